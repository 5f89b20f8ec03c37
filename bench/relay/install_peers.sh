#!/usr/bin/env bash
# Other gateways for `make bench-relay`, in an environment of their own (bench/out/relay-peers): no dependency of Penstock.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=bench/out/relay-peers
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q smg==1.13.0 vllm-router==0.1.17 || echo "smg or vllm-router could not be installed" >&2
# Whichever release has dependencies that can be had; not 1.107, which was compromised.
"$venv/bin/pip" install -q 'litellm[proxy]>=1.100,!=1.107.*' || echo "litellm could not be installed" >&2
