"""Writes docs/metrics.md from the catalog and the aliases. `python scripts/metrics_page.py` after one has
changed; tests/telemetry/test_metrics.py compares.
"""

from collections.abc import Iterator
from pathlib import Path

from penstock.telemetry.catalog import CATALOG
from penstock.telemetry.pages import COMPUTED, RENAMED

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

`GET /metrics`, of all gateway processes together; [the API](api.md) says who may read it. Written by
`scripts/metrics_page.py` from `penstock/telemetry/catalog.py`, where names and labels are an interface.
TTFT is queue and prefill, which are counted apart. Labels have values from closed sets: configured models
and bands, workers that are there, outcomes; of tenants the 32 that use most have their names and all others
are `other`, so nothing that a client invents adds a series. [The runbook](runbook.md) explains objectives;
`GET /admin/history` has the last 15 minutes and 24 hours without a Prometheus.

Each worker of ours tells every five seconds what it takes of its machine, and what NVML says of its GPU; the
gateway passes it on per worker, under the names of NVIDIA's DCGM exporter where it is about a GPU.
`penstock_worker_info` joins engine, version (identity) and device to every series with the label `worker`:
the mean prefill by version, for example, is

```
  sum by (model, identity) (rate(penstock_worker_prefill_seconds_total[5m])
    * on (model, worker) group_left (identity, device) penstock_worker_info)
/ sum by (model, identity) (rate(penstock_worker_requests_total{outcome="answered"}[5m])
    * on (model, worker) group_left (identity, device) penstock_worker_info)
```

Counting takes no lock and no client library (`penstock/telemetry/instruments.py`): all of it happens on the
event loop's thread, an observation is one bisection into a row of integers, and the text of every series is
made once. A request's end costs about two microseconds here, a page a tenth of a millisecond for one model;
`tests/telemetry/test_instruments.py` holds the page against that of Prometheus' own client.

[`examples/observability/`](../examples/observability/) starts Prometheus and Alertmanager beside a server.

| name | kind | unit | labels | what | for |
|---|---|---|---|---|---|
"""
ALIASES = """
## The same under other names

For dashboards, autoscalers and endpoint pickers that know vLLM's metrics, the Gateway API inference
extension's model server protocol (which uses vLLM's names) or OpenTelemetry's GenAI conventions. All workers
of a model are one engine, `engine="0"`.

| theirs | ours |
|---|---|
"""
_SOURCES = (
    "penstock_kv_blocks",
    "penstock_kv_block_tokens",
    "penstock_requests_total",
    "penstock_adapter_workers",
)


def written() -> str:
    """The whole page."""
    return "".join([HEAD, *_rows(), ALIASES, *_aliases()])


def _rows() -> Iterator[str]:
    for metric in CATALOG:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        row = (f"`{metric.name}`", metric.kind, metric.unit, labels, metric.help, metric.needed_by)
        yield f"| {' | '.join(row)} |\n"


def _aliases() -> Iterator[str]:
    for source, names in RENAMED.items():
        yield from (f"| `{name}` | `{source}` |\n" for name in names)
    for name, source in zip(COMPUTED, _SOURCES, strict=True):
        yield f"| `{name}` | computed from `{source}` |\n"


if __name__ == "__main__":
    PAGE.write_text(written())
