"""Ten thousand paced streams through one gateway process: errors, delay added per chunk, memory over time.

    python bench/streams_10k.py [--streams 10000] [--seconds 60] [--period-ms 1000] [--out FILE]

The streams come from a stand-in worker over one Unix socket, so the gateway needs one descriptor per client. All streams step
together, which is the worst case: every period brings one burst of as many chunks as there are streams. What is reported as added is how much
later than the period a chunk came after the one before, worker, kernel and client included; it counts from when every stream
has begun. `make soak` runs it for half an hour.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from relay_peers import Shape, load, wait_answers
from relay_process import HERE, Process, build, free_port

SETTLE_S = 60
"""For starting: streams begin one after the other, and the last must not be behind the first one's end."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--period-ms", type=int, default=1000)
    parser.add_argument("--settle", type=int, default=SETTLE_S, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    period_us = args.period_ms * 1000
    with tempfile.TemporaryDirectory(prefix="streams-") as name:
        place = Path(name)
        build(place)
        port, socket = free_port(), str(place / "worker.sock")
        worker = Process(
            sys.executable, str(HERE / "stand_in_worker.py"), socket, str(period_us), log=place / "w"
        )
        time.sleep(0.5)
        gateway = Process(sys.executable, str(HERE / "gateway.py"), socket, str(port), "all", log=place / "g")
        try:
            wait_answers(place, port, gateway)
            chunks = (args.seconds + args.settle) * 1000 // args.period_ms
            shape = Shape("streams", args.streams, args.streams, chunks, period_us)
            memory: list[float] = []
            stop = threading.Event()

            def watch() -> None:
                while not stop.wait(1.0):
                    memory.append(gateway.rss_mb())

            watcher = threading.Thread(target=watch)
            watcher.start()
            before = gateway.cpu_s()
            seen = load(place, port, shape, args.streams)
            cpu_s = gateway.cpu_s() - before
            stop.set()
            watcher.join()
        finally:
            gateway.end()
            worker.end()
    begun = memory[min(len(memory) - 1, args.settle) :]
    added = {f"added_{key}_ms": (seen[f"gap_{key}_us"] - period_us) / 1000 for key in ("p50", "p99", "worst")}
    result = {
        "streams": args.streams, "seconds": round(seen["seconds"], 1), "chunks": seen["events"],
        "errors": seen["errors"], "cpu_us_per_chunk": round(cpu_s / seen["events"] * 1e6, 1), **added,
        "rss_mb_when_begun": round(begun[0], 1), "rss_mb_at_the_end": round(begun[-1], 1),
        "rss_mb_worst": round(max(memory), 1),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
