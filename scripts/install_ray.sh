#!/usr/bin/env bash
# Install Ray beside the virtual environment of the tests: into $VENV/ray, which sees all that is installed in $VENV. It is
# 380 MB and brings other versions of what we use, so it is no part of the dev extra. Does nothing when that was done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
version=$(sed -n 's/^ray==//p' constraints.txt)
stamp=$venv/ray/.installed-$version
if [ -e "$stamp" ]; then exit 0; fi
printf '\033[1minstalling Ray %s into %s/ray\033[0m\n' "$version" "$venv" >&2
"$venv/bin/python" -m venv --clear "$venv/ray"
"$venv/ray/bin/python" -m pip install --disable-pip-version-check --quiet "ray[default]==$version"
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$venv/ray/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-the-tests.pth"
touch "$stamp"
