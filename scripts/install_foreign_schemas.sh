#!/usr/bin/env bash
# Install the packages of bench/grammar/foreign/requirements.txt into $VENV/foreign. Does nothing when that was done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
inputs=bench/grammar/foreign/requirements.txt
stamp=$venv/foreign/.installed-$(sha256sum <$inputs | cut -c1-16)
if [ -e "$stamp" ]; then exit 0; fi
printf '\033[1minstalling the packages of %s into %s/foreign\033[0m\n' "$inputs" "$venv" >&2
"$venv/bin/python" -m venv --clear "$venv/foreign"
"$venv/foreign/bin/python" -m pip install --disable-pip-version-check --quiet -r $inputs
touch "$stamp"
