"""The tables of bench/relay/peers.py: the gateways side by side, and ours over others' of the same rounds."""

import statistics

from bench.harness import Spread, short, spread, table

Round = dict[str, float]
Results = dict[str, dict[str, list[Round]]]
"""Gateway -> shape -> its rounds, in order."""
STREAMED = ("chunks", "each", "paced")


def figures(results: Results, gateway: str, shape: str, key: str = "cpu_s_per_1000") -> list[float]:
    """One figure of every round; empty if there is none."""
    return [round_[key] for round_ in results.get(gateway, {}).get(shape, []) if key in round_]


def shown(values: list[float]) -> Spread | str:
    """Median and range; of one round the figure; of none nothing."""
    return spread(values) if len(values) > 1 else "".join(map(short, values))


def added_us(results: Results, gateway: str, shape: str = "alone", at: str = "p50") -> list[float]:
    """The time that the gateway adds to a request, at the median or the 99th percentile of a round."""
    key = f"total_{at}_us"
    bare = figures(results, "upstream", shape, key)
    rounds = results.get(gateway, {}).get(shape, [])
    if not all("direct_p50_us" in round_ for round_ in rounds) and not bare:
        return []
    return [
        r[key] - (r["direct_p50_us"] if "direct_p50_us" in r else statistics.median(bare)) for r in rounds
    ]


def peer_table(results: Results) -> str:
    """Every gateway: CPU-seconds per 1,000 requests by shape, events per request, memory, latency added."""
    rows: list[list[object]] = []
    for gateway, shapes in results.items():
        if gateway == "upstream":
            continue
        cells: list[object] = [gateway, shown(figures(results, gateway, "whole"))]
        for shape in STREAMED:
            events = figures(results, gateway, shape, "events_per_request")
            cells.append(shown(figures(results, gateway, shape)))
            cells.append(f"{statistics.median(events):.0f}" if events else "")
        memory = max((r["rss_mb"] for rounds in shapes.values() for r in rounds), default=0.0)
        waits = added_us(results, gateway, "open", "p99")
        rows.append([*cells, f"{memory:.0f}", shown(added_us(results, gateway)), shown(waits)])
    streams = [name for shape in STREAMED for name in (shape, "events")]
    return table(("CPU-s per 1,000", "whole", *streams, "MB", "added p50, us", "p99, us"), rows)


def ratio_table(results: Results) -> str:
    """Ours over each peer's, round by round; of other numbers of rounds, each of ours to their median."""
    rows: list[list[object]] = []
    for ours in (name for name in results if name.startswith("penstock")):
        for peer in (name for name in results if not name.startswith(("penstock", "upstream"))):
            cells: list[object] = []
            for shape in ("whole", "chunks", "paced"):
                mine, others = figures(results, ours, shape), figures(results, peer, shape)
                if others and len(mine) != len(others):
                    others = [statistics.median(others)] * len(mine)
                pairs = zip(mine, others, strict=True) if others else ()
                cells.append(shown([a / b for a, b in pairs if b]))
            if any(cells):
                rows.append([f"{ours} / {peer}", *cells])
    return table(("CPU", "whole", "chunks", "paced"), rows)
