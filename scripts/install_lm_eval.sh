#!/usr/bin/env bash
# Install lm-eval beside the virtual environment of the tests: into $VENV/lm-eval, which sees all that is installed in $VENV
# (transformers, for its tokenizer). Does nothing when that was done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
version=0.4.13
stamp=$venv/lm-eval/.installed-$version
if [ -e "$stamp" ]; then exit 0; fi
printf '\033[1minstalling lm-eval %s into %s/lm-eval\033[0m\n' "$version" "$venv" >&2
"$venv/bin/python" -m venv --clear "$venv/lm-eval"
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$venv/lm-eval/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-the-tests.pth"
"$venv/lm-eval/bin/python" -m pip install --disable-pip-version-check --quiet "lm-eval[api]==$version"
touch "$stamp"
