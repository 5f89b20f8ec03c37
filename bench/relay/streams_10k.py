"""Does one gateway process hold ten thousand paced streams? Errors, delay per chunk, memory, CPU, and goals.

    python -m bench.relay.streams_10k [--streams 10000] [--seconds 60] [--period-ms 1000] [--workers 40]
    [--answer-tokens 256] [--out FILE]

The streams come from a stand-in worker over one Unix socket, so the gateway needs one descriptor per client.
As the rows of 40 workers do, they step in 40 batches spread over the period (of 250 streams each, one every
25 ms); `--workers 1` lets all of them step together, which no fleet does: one burst of as many chunks as
there are streams. The added time that is reported is from when the worker sent a token to when the client had
it, gateway, kernel and client included; it counts from when every stream has begun. A stream that ends is
followed by the next on its connection; the first ones end at random places, so that later ones begin evenly.
(The gateway keeps the tokens of running answers, four bytes each, to be able to go on elsewhere: with answers
that never end memory grows.) The gateway has every feature on (`OWN` of bench/relay/gateways.py). `make soak`
runs it for half an hour.
"""

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import command_line, write_result
from bench.process import Process, build
from bench.relay.gateways import Gateway, Shape, request_bytes, serving
from bench.relay.stand_in_worker import Steps
from penstock.config.checkpoints import resolve
from penstock.text.tokenizer import Tokenizer

SETTLE_S = 60
"""For starting: streams begin one after the other."""
INTERVAL_S = 60
ADDED_P99_MS = 50.0
RSS_MB, GROWTH_MB = 200.0, 5.0
"""At most, and between the first and the last tenth of the time: "flat", but for an allocator's whims."""
Sample = tuple[float, float, float]
"""Seconds since the beginning, resident MB, CPU-seconds."""


@contextlib.contextmanager
def watched(process: Process) -> Iterator[list[Sample]]:
    """Memory and CPU of a process, once a second."""
    ended, began_s, samples = threading.Event(), time.monotonic(), list[Sample]()

    def run() -> None:
        while not ended.wait(1.0):
            samples.append((time.monotonic() - began_s, process.rss_mb(), process.cpu_s()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def write_steps(path: Path, model: str) -> None:
    """The tokens whose text is two letters, each for one step at a time: by them the client knows when they
    were sent.
    """
    tokenizer = Tokenizer.load(resolve(model))
    found: dict[bytes, int] = {}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text is not None and re.fullmatch(rb"[A-Za-z0-9]{2}", text):
            found.setdefault(text, token)
    path.write_bytes(b"".join(Steps.ENTRY.pack(text, token, 0.0) for text, token in found.items()))


def stream(place: Path, port: int, shape: Shape, seconds: float) -> list[dict[str, float]]:
    """So many seconds of streams: a line per minute, and the sum."""
    file = place / "request"
    file.write_bytes(request_bytes(port, shape))
    numbers = [str(port), str(shape.connections), str(shape.requests), str(file), str(place / "steps")]
    lines: list[dict[str, float]] = []
    with subprocess.Popen(
        [str(place / "load"), *numbers, str(INTERVAL_S), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        for line in client.stdout:
            lines.append(json.loads(line))
            if "at_s" in lines[-1]:
                print(line.strip(), file=sys.stderr)
    if client.returncode:
        sys.exit(f"the load client failed ({client.returncode})")
    return lines


def summary(lines: list[dict[str, float]], samples: list[Sample], settle_s: float) -> dict[str, object]:
    """Of a run. Memory and the share of a core count from when the streams have begun."""
    *minutes, seen = lines
    if not seen["tokens_timed"]:
        sys.exit(f"not every stream began within the time: a longer --settle may do; {seen}")
    steady = [sample for sample in samples if settle_s <= sample[0]] or samples
    tenth = max(1, len(steady) // 10)
    first, last = (statistics.median(mb for _, mb, _ in part) for part in (steady[:tenth], steady[-tenth:]))
    worst, p99_ms = max(mb for _, mb, _ in samples), seen["added_p99_us"] / 1000
    spent_s, share = samples[-1][2] - samples[0][2], steady[-1][2] - steady[0][2]
    return {
        **{name: int(seen[name]) for name in ("events", "requests", "errors", "tokens_timed")},
        "seconds": round(seen["seconds"], 1),
        **{f"added_{key}_ms": seen[f"added_{key}_us"] / 1000 for key in ("p50", "p99", "worst")},
        "cpu_us_per_chunk": round(spent_s / seen["events"] * 1e6, 1),
        "cpu_share_of_a_core": round(share / max(1.0, steady[-1][0] - steady[0][0]), 3),
        "rss_mb_when_begun": round(first, 1), "rss_mb_at_the_end": round(last, 1),
        "rss_mb_worst": round(worst, 1),
        "goals": {
            "errors 0": not seen["errors"],
            f"added p99 < {ADDED_P99_MS:.0f} ms": p99_ms < ADDED_P99_MS,
            f"memory < {RSS_MB:.0f} MB": worst < RSS_MB,
            f"memory flat (within {GROWTH_MB:.0f} MB)": last - first < GROWTH_MB,
        },
        "by_minute": minutes,
        "over_time": [
            {"at_s": round(at_s), "rss_mb": round(mb, 1), "cpu_s": round(cpu, 2)}
            for at_s, mb, cpu in samples[:: max(1, len(samples) // 120)]
        ],
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--period-ms", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=40, help="batches that step one after the other")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--settle", type=int, default=SETTLE_S, metavar="SECONDS")
    args = parser.parse_args()
    period_us = args.period_ms * 1000
    with tempfile.TemporaryDirectory(prefix="streams-") as name:
        place = Path(name)
        build(place)
        write_steps(place / "steps", "penstock-demo-mini")
        seconds = args.seconds + args.settle
        rounds = 2 + 2 * seconds * 1000 // args.period_ms // args.answer_tokens  # More than can end.
        shape = Shape("streams", args.streams, args.streams * rounds, args.answer_tokens, period_us)
        behind = map(str, (args.workers, place / "steps", args.streams))
        with (
            serving(Gateway("penstock"), shape, place, worker=tuple(behind)) as (port, gateway),
            watched(gateway) as samples,
        ):
            lines = stream(place, port, shape, seconds)
    names = ("streams", "workers", "period_ms", "answer_tokens")
    result = {name: vars(args)[name] for name in names} | summary(lines, samples, args.settle)
    print(json.dumps({key: value for key, value in result.items() if key != "over_time"}, indent=1))
    write_result(args.json, result)


if __name__ == "__main__":
    main()
