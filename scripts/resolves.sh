#!/usr/bin/env bash
# Whether the pins of constraints.txt go together as PyPI alone has the packages, with wheels for each Python that
# is named (default: all that pyproject.toml names). Installs nothing. Usage: scripts/resolves.sh [3.11 3.13 ...]
set -euo pipefail
cd "$(dirname "$0")/.."
# Neither settings nor folders of this machine: a stranger's has none.
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_CONSTRAINT
export PIP_CONFIG_FILE=/dev/null
# shellcheck disable=SC2046
[ $# -gt 0 ] || set -- $(sed -n 's/.*Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
for version in "$@"; do
    for extra in engine dev; do
        mapfile -t wanted < <("${VENV:-.venv}/bin/python" - "$extra" <<'EOF'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
def asked(names):
    for name in names:
        ours = re.fullmatch(r"penstock\[(.*)\]", name)
        yield from asked([each for extra in ours[1].split(",") for each in extras[extra]]) if ours else [name]
extras = project["optional-dependencies"]
print(*asked([*project["dependencies"], *extras[sys.argv[1]]]), sep="\n")
EOF
        )
        "${VENV:-.venv}/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
            --target "${TMPDIR:-/tmp}/resolves" --python-version "$version" --only-binary :all: \
            -c constraints.txt "${wanted[@]}"
        echo "Python $version: [$extra] resolves"
    done
done
