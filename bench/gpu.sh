#!/usr/bin/env bash
# Everything that one GPU can tell, in one call of under nine minutes and without a network: correctness, ceilings of the
# device, kernels, decode and prefill of three model shapes, throughput. See docs/engine.md, "GPU".
#
#   bench/gpu.sh [--sections a,b] [--out DIR] [--cpu --tiny]
#
# PYTHON: the interpreter that has torch, triton, numpy and transformers (default: python3).
# WHEELS: a directory of wheels of what it lacks (msgspec); they go to a temporary directory.
# OUT:    where the JSON goes (default: docs/results).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -m bench.gpu.main "$@"
