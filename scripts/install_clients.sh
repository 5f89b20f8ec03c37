#!/usr/bin/env bash
# Install the clients of tests/clients beside the virtual environment of the tests: those in Python into $VENV/clients, those in
# JavaScript into $VENV/clients-node, where there is a Node. Does nothing when that was done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
here=tests/clients
inputs=$(cat $here/requirements.txt $here/node/package.json | sha256sum | cut -c1-16)
stamp=$venv/clients/.installed-$inputs
if [ -e "$stamp" ]; then exit 0; fi
printf '\033[1minstalling the clients of tests/clients into %s/clients\033[0m\n' "$venv" >&2
"$venv/bin/python" -m venv --clear "$venv/clients"
"$venv/clients/bin/python" -m pip install --disable-pip-version-check --quiet -r $here/requirements.txt
rm -rf "$venv/clients-node"
if command -v npm >/dev/null; then
    mkdir "$venv/clients-node"
    cp $here/node/package.json "$venv/clients-node"
    npm install --prefix "$venv/clients-node" --no-fund --no-audit --no-package-lock --loglevel=error >&2
fi
touch "$stamp"
