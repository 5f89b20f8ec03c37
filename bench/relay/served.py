"""The benchmark of `make bench`: the server as users start it, under load.

    python -m bench.relay.served [--concurrency 1,8,32] [--duration S | --requests N] [--overload 1,2,5,20]
        [--json FILE] [-- MODEL --serve-flags]

Starts `penstock serve` on a free port, measures it with `penstock bench`, and measures the load generator
alone against an endpoint that computes nothing (to show how far it is from being the bottleneck). With
`--overload` requests come at so many times the rate that the closed loop got at most, whether or not others
have ended: goodput is to hold, though most are refused. JSON goes to bench/out/; the last lines are the
summary.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import OUT, REPOSITORY, command_line, table
from bench.process import SERVE, Served, load_report
from penstock import rng

STOP_TIMEOUT_S = 60


@contextlib.contextmanager
def scripted() -> Iterator[str]:
    """An endpoint that only plays a script."""
    command = [sys.executable, str(REPOSITORY / "tests" / "doubles" / "scripted_endpoint.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


def levels_table(levels: list[dict]) -> str:
    """Throughput and times of closed loops."""
    names = ("output tok/s", "req/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "failed")
    rows = [
        (
            level["name"], f"{level['output_tokens_per_s']:,.1f}", f"{level['requests_per_s']:.2f}",
            *(f"{level[time][at]:.2f}" for time in ("ttft_ms", "tpot_ms") for at in ("p50", "p99")),
            level["requests_failed"],
        )
        for level in levels
    ]  # fmt: skip
    return table(("load", *names), rows)


def overload_table(levels: list[dict]) -> str:
    """Goodput of open loops, beside the best of them."""
    peak = {unit: max(level[f"goodput_{unit}_per_s"] for level in levels) for unit in ("requests", "tokens")}
    rows = [
        (
            level["name"], *(f"{level[f'goodput_{unit}_per_s']:,.1f}" for unit in peak),
            *(f"{level[f'goodput_{unit}_per_s'] / max(best, 1e-9):.0%}" for unit, best in peak.items()),
            f"{level['ttft_ms']['p99']:.0f}", level["requests_failed"],
        )
        for level in levels
    ]  # fmt: skip
    head = ("good requests/s", "tok/s", "of the best", "tok/s", "TTFT p99 ms", "refused")
    return table(("arrivals", *head), rows)


def summary(ready_s: float, report: dict, client: dict) -> str:
    """For people."""
    parts = [f"{report['model']}, ready after {ready_s:.1f} s", levels_table(report["levels"])]
    if report["overload"]:
        parts.append(overload_table(report["overload"]))
    alone, env = client["levels"][0]["output_tokens_per_s"], report["environment"]
    busiest = max(level["output_tokens_per_s"] for level in report["levels"])
    parts.append(
        f"The load generator alone reaches {alone:,.0f} tok/s at {client['levels'][0]['name']}: "
        f"{alone / max(busiest, 1e-9):,.0f} times what was measured here."
    )
    return "\n".join(
        [
            *parts,
            f"{env['cpu']}, {env['cpus_usable']} cores, Python {env['python']}, penstock {env['penstock']}",
        ]
    )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("serve", nargs="*", help="arguments of `penstock serve`, after --")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--overload", default="", metavar="TIMES", help="open loops, e.g. 1,2,5,20")
    parser.add_argument("--duration", default="8", help="seconds per level")
    parser.add_argument("--requests", help="per level, instead of --duration")
    parser.add_argument("--seed", default="1")
    args = parser.parse_args()
    path = args.json or OUT / time.strftime("serve-%Y%m%d-%H%M%S.json")
    levels = ("--concurrency", args.concurrency, "--seed", args.seed)
    until = ("--requests", args.requests) if args.requests else ("--duration", args.duration)
    key, place = rng.fresh_token(), OUT / "serve"
    command = (*SERVE, "--log-level", "warning", *args.serve)  # No access log of what is measured.
    with Served(place, "", command=command, cwd=Path.cwd(), PENSTOCK_API_KEY=key) as served:
        report = load_report(served.url, key, *levels, *until)
        capacity = max(level["requests_per_s"] for level in report["levels"])
        report["overload"] = list[dict]()
        for times in filter(None, args.overload.split(",")):
            rate = ("--rate", f"{float(times) * capacity:.3f}", "--seed", args.seed)
            report["overload"] += load_report(served.url, key, *rate, *until)["levels"]
    with scripted() as url:
        alone = ("--concurrency", args.concurrency.split(",")[-1], "--requests", "1000", "--seed", args.seed)
        client = load_report(url, "", *alone)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{summary(served.ready_s, report, client)}\nJSON: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
