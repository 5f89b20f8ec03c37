#!/usr/bin/env bash
# Unpack Prometheus, promtool, Alertmanager and amtool into $VENV/prometheus/bin, from Debian's packages: no service is started, and
# nothing is installed but Alertmanager's templates, which its binary looks for under /usr/share. Does nothing when that was done
# already, or when all four are on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${VENV:-.venv}/prometheus
programs="prometheus promtool alertmanager amtool"
missing=0
for program in $programs; do command -v "$program" >/dev/null || [ -x "$place/bin/$program" ] || missing=1; done
[ "$missing" = 1 ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "Put Prometheus and Alertmanager on the PATH: https://prometheus.io/download (Debian: this script unpacks them)." >&2
    exit 1
fi
printf '\033[1munpacking Prometheus and Alertmanager into %s\033[0m\n' "$place" >&2
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
mkdir -p "$place/packages" "$place/bin"
# An index that is out of date names packages that are gone.
(cd "$place/packages" && { apt-get download -qq prometheus prometheus-alertmanager ||
    { $sudo apt-get update -qq && apt-get download -qq prometheus prometheus-alertmanager; }; }) 2>&1 | grep -v "unsandboxed as root" >&2 || true
for package in "$place"/packages/*.deb; do dpkg -x "$package" "$place/root"; done
for program in $programs; do
    found=$place/root/usr/bin/$program  # Debian has a prefix before the names of Alertmanager's.
    [ -x "$found" ] || found=$place/root/usr/bin/prometheus-$program
    mv "$found" "$place/bin/$program"
done
templates=/usr/share/prometheus/alertmanager
[ -e $templates/default.tmpl ] || { $sudo mkdir -p $templates && $sudo cp "$place/root$templates"/*.tmpl $templates; }
rm -rf "$place/packages" "$place/root"
