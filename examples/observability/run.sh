#!/usr/bin/env bash
# Prometheus and Alertmanager beside a running server (`make serve` in another shell): `make observe`. Ctrl-C ends both.
# PENSTOCK_PORT (8000), PROMETHEUS_PORT (9090), ALERTMANAGER_PORT (9093), PENSTOCK_ADMIN_KEY (the key of the server on this machine).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "$here/../.." && cd "${VENV:-.venv}" && pwd)
PATH=$venv/prometheus/bin:$venv/bin:$PATH
port=${PENSTOCK_PORT:-8000}
server=127.0.0.1:$port manager=127.0.0.1:${ALERTMANAGER_PORT:-9093} prometheus=127.0.0.1:${PROMETHEUS_PORT:-9090}
place=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$place"' EXIT
umask 077
key=${PENSTOCK_ADMIN_KEY:-$(python -c "from penstock.cli.wiring.state import load_key; print(load_key('127.0.0.1', $port))")}
printf %s "$key" >"$place/key"
penstock alerts --rules ${PENSTOCK_CONFIG:+-c "$PENSTOCK_CONFIG"} >"$place/rules.yaml"
sed -e "s|RULES|$place/rules.yaml|; s|ALERTMANAGER|$manager|; s|KEY_FILE|$place/key|; s|SERVER|$server|" \
    "$here/prometheus.yml" >"$place/prometheus.yml"
alertmanager --config.file="$here/alertmanager.yml" --storage.path="$place/alertmanager" --cluster.listen-address= \
    --web.listen-address="$manager" --log.level=warn &
prometheus --config.file="$place/prometheus.yml" --storage.tsdb.path="$place/prometheus" \
    --web.listen-address="$prometheus" --log.level=warn &
echo "Prometheus: http://$prometheus  Alertmanager: http://$manager  (scraping http://$server/metrics)"
wait -n
