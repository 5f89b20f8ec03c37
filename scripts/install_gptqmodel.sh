#!/usr/bin/env bash
# Install what transformers wants for quantized checkpoints beside the virtual environment of the tests: into
# $VENV/gptqmodel, which sees all that is installed in $VENV (transformers, and torch for the CPU). Does nothing when that
# was done already. Without dependencies where these would bring a torch for CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
version=7.7.0
stamp=$venv/gptqmodel/.installed-$version
if [ -e "$stamp" ]; then exit 0; fi
printf '\033[1minstalling gptqmodel %s into %s/gptqmodel\033[0m\n' "$version" "$venv" >&2
"$venv/bin/python" -m venv --clear "$venv/gptqmodel"
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$venv/gptqmodel/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-the-tests.pth"
pip="$venv/gptqmodel/bin/python -m pip install --disable-pip-version-check --quiet"
$pip --no-deps "gptqmodel==$version" optimum==2.3.0 compressed-tensors==0.20.0 accelerate \
    defuser==0.0.28 device-smi==0.5.7 logbar==0.4.15 loguru ninja pypcre==0.6.4 threadpoolctl tokenicer==0.0.14 torchao==0.18.0
$pip datasets==5.2.0 pillow protobuf
touch "$stamp"
