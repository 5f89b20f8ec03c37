"""The benchmark of `make bench`: the server as users start it, under load.

    python -m bench.relay.served [--concurrency 1,8,32] [--duration S | --requests N] [-- MODEL --serve-flags]

Starts `penstock serve` on a free port, measures it with `penstock bench`, and measures the load generator
alone against an endpoint that computes nothing (to show how far it is from being the bottleneck). JSON goes
to bench/out/; the last lines are the summary.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import REPOSITORY, command_line, table
from bench.process import SERVE, Served
from penstock import rng

OUT = REPOSITORY / "bench" / "out"
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


def measure(url: str, key: str, path: Path, flags: list[str]) -> dict:
    """One `penstock bench`; its progress bar shows, its tables are replaced by our summary."""
    command = [sys.executable, "-m", "penstock", "bench", "--url", url, "--json", str(path), *flags]
    environment = {**os.environ, "PENSTOCK_API_KEY": key}
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(path.read_text())


def summary(ready_s: float, report: dict, client: dict) -> str:
    """For people."""
    names = ("output tok/s", "req/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "failed")
    rows = [
        (
            level["name"], f"{level['output_tokens_per_s']:,.1f}", f"{level['requests_per_s']:.2f}",
            *(f"{level[time][at]:.2f}" for time in ("ttft_ms", "tpot_ms") for at in ("p50", "p99")),
            level["requests_failed"],
        )
        for level in report["levels"]
    ]  # fmt: skip
    alone, env = client["levels"][0]["output_tokens_per_s"], report["environment"]
    busiest = max(level["output_tokens_per_s"] for level in report["levels"])
    return (
        f"{report['model']}, ready after {ready_s:.1f} s\n{table(('load', *names), rows)}\n"
        f"The load generator alone reaches {alone:,.0f} tok/s at {client['levels'][0]['name']}: "
        f"{alone / max(busiest, 1e-9):,.0f} times what was measured here.\n"
        f"{env['cpu']}, {env['cpus_usable']} cores, Python {env['python']}, penstock {env['penstock']}"
    )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("serve", nargs="*", help="arguments of `penstock serve`, after --")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--duration", default="8", help="seconds per level")
    parser.add_argument("--requests", help="per level, instead of --duration")
    parser.add_argument("--seed", default="1")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    path = args.json or OUT / time.strftime("serve-%Y%m%d-%H%M%S.json")
    flags = ["--concurrency", args.concurrency, "--seed", args.seed]
    flags += ["--requests", args.requests] if args.requests else ["--duration", args.duration]
    key, place = rng.fresh_token(), OUT / "serve"
    command = (*SERVE, "--log-level", "warning", *args.serve)  # No access log of what is measured.
    with Served(place, "", command=command, cwd=Path.cwd(), PENSTOCK_API_KEY=key) as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        report = measure(url, key, path, flags)
    with scripted() as url:
        alone = ["--concurrency", args.concurrency.split(",")[-1], "--requests", "1000", "--seed", args.seed]
        client = measure(url, "", OUT / "client.json", alone)
    print(f"\n{summary(served.ready_s, report, client)}\nJSON: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
