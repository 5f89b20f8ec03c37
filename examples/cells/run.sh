#!/bin/sh
# Three cells on this machine, and one request for each thing that they do for each other. Ctrl-C ends them.
set -eu
cd "$(dirname "$0")/../.."
penstock=${PENSTOCK:-penstock}
place=$(mktemp -d)
export PENSTOCK_CELL_KEY PENSTOCK_API_KEY=sk-for-the-cells PENSTOCK_ADMIN_KEY=sk-admin-for-the-cells
PENSTOCK_CELL_KEY=$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')
pids=""
trap 'kill $pids 2>/dev/null; wait; rm -rf "$place"' EXIT INT TERM
port=8001
for cell in east west north; do
  mkdir -p "$place/$cell"
  PENSTOCK_CELL=$cell PENSTOCK_PORT=$port PENSTOCK_STATE_DIR=$place/$cell \
    $penstock serve -c examples/cells/cells.yaml >"$place/$cell/log" 2>&1 &
  pids="$pids $!"
  port=$((port + 1))
done
for cell in east west north; do
  until grep -q "Ctrl-C drains" "$place/$cell/log"; do sleep 0.2; done
done
ask() {
  curl -sS -D - -o /dev/null http://127.0.0.1:8001/v1/completions -H "Authorization: Bearer $PENSTOCK_API_KEY" \
    -H 'Content-Type: application/json' "$@" -d '{"model": "river", "prompt": "The river", "max_tokens": 8}' |
    tr -d '\r' | grep -i -e '^HTTP' -e x-penstock-cell || true
}
echo "in the east, where it came to:"; ask
echo "bound to the US:"; ask -H 'x-penstock-residency: us'
echo "bound to a place that there is not:"; ask -H 'x-penstock-residency: mars'
$penstock top --once --url http://127.0.0.1:8001 --key "$PENSTOCK_ADMIN_KEY"
wait
