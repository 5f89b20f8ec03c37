#!/usr/bin/env bash
# Install what tests/console takes: a Chromium (Debian's), Playwright to drive it, and axe-core, which `npm ci` in console/
# brings. Does nothing when that was done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
if ! command -v chromium >/dev/null; then
    sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium >&2
fi
"$venv/bin/python" -c "import playwright" 2>/dev/null ||
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet -c constraints.txt playwright
if [ ! -e console/node_modules/axe-core/axe.min.js ]; then
    (cd console && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error >&2)
fi
