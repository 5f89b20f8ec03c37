#!/usr/bin/env bash
# Make the virtual environment .venv and install Penstock into it with the given extras, at the versions
# of constraints.txt. Does nothing when that was done already. Usage: scripts/setup.sh engine|dev
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?usage: scripts/setup.sh engine|dev}
venv=${VENV:-.venv}
inputs=$(cat pyproject.toml constraints.txt setup.py penstock/engine/native/kernels/* | sha256sum | cut -c1-16)
stamp="$venv/.installed-$extra-$inputs"
# What developers need includes all that the engine needs.
if [ -e "$stamp" ] || [ -e "$venv/.installed-dev-$inputs" ]; then exit 0; fi

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

find_python() {
    for python in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    say "Penstock needs Python 3.11 or newer (Debian: apt-get install python3)."
    exit 1
}

# A bare Debian has no ensurepip, and building the native kernels wants g++.
apt_install() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    if ! command -v apt-get >/dev/null; then
        say "please install: $*"
        return 1
    fi
    say "installing $* (apt)"
    $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$@" >&2
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
    command -v g++ >/dev/null || apt_install g++ || say "no C++ compiler: the engine will use torch's own kernels"
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
say "installing Penstock [$extra] into $venv (the first time this takes a minute or two)"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[$extra]"
# The tests of shared limits start a Redis of their own; where it cannot be installed without a password they are skipped.
if [ "$extra" = dev ] && ! command -v redis-server >/dev/null; then
    if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
        apt_install redis-server || say "no redis-server: the tests that need one will be skipped"
    else
        say "no redis-server: the tests that need one will be skipped (apt-get install redis-server)"
    fi
fi
rm -f "$venv"/.installed-"$extra"-*
touch "$stamp"
