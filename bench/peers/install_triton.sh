#!/usr/bin/env bash
# Install a real tritonserver (its CPU build with the python backend, as nvidia-pytriton carries it) into an environment of
# its own: bench/out/peers/triton. Does nothing when that was done already. The server's python backend needs the system's
# own Python with its shared library, so not the one of the tests. Usage: bench/peers/install_triton.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.7.0
venv=$(mkdir -p bench/out/peers && cd -P bench/out/peers && pwd)/triton
stamp=$venv/.installed-$version
if [ -e "$stamp" ]; then exit 0; fi
printf '\033[1minstalling Triton (nvidia-pytriton %s) into %s\033[0m\n' "$version" "$venv" >&2
"${SYSTEM_PYTHON:-/usr/bin/python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet "nvidia-pytriton==$version"
touch "$stamp"
