"""Where the CPU of a relayed request goes, by stage: `penstock serve` in front of an HTTP worker, profiled.

    python -m bench.relay.stages [--shapes whole,paced] [--requests 600] [--json FILE]

Shares of the main thread's time in Python and in what Python calls, by cProfile, which makes calls dearer
than they are: shares tell where to look, and `calls` (of functions, C's included) for each request are the
same on every machine. The kernel's part, in `write` and in the event loop, is not told apart.
"""

import os
import pstats
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.harness import command_line, table, write_result
from bench.process import Process, build, free_port
from bench.relay.gateways import HERE, OURS
from bench.relay.peers import KEY, SHAPES, Shape, load, wait_answers

STAGES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reading the request, who asks": (("http/connection.py:data_received", "app.py:handle"), ()),
    "parsing it": (("openai_validate.py:parse_chat",), ()),
    "the chat template": (("text/chat.py:render_values",), ()),
    "tokenizing": (("text/tokenizer.py:encode",), ()),
    "limits, admission, queue": (("lifecycle/control.py:arrive",), ()),
    "the ledger": (tuple(f"telemetry/ledger.py:{name}" for name in ("open", "slice", "close", "flush")), ()),
    "the rest of preparing and submitting": (
        ("api/generate.py:answer_chat",),
        (
            "openai_validate.py:parse_chat", "text/chat.py:render_values", "text/tokenizer.py:encode",
            "lifecycle/control.py:arrive", "telemetry/ledger.py:open",
        ),
    ),
    "placing": (("lifecycle/control.py:dispatch",), ()),
    "sending it to the worker": (("http/backend.py:generate",), ()),
    "reading the answer": (
        ("http/client.py:data_received",),
        ("relay.py:on_delta", "collect.py:on_delta", "relay.py:on_finish", "collect.py:on_finish"),
    ),
    "learning from the first output": (("lifecycle/control.py:first_output",), ()),
    "settling at the end": (("lifecycle/control.py:ended",), ()),
    "metrics, history, access log": (("gateway/app.py:finished",), ()),
    "writing to the client": (("http/connection.py:write",), ()),
}  # fmt: skip
"""Of each, functions whose time is in it with all that they call, and those of them that are not."""


def profile(shape: Shape, requests: int, place: Path) -> pstats.Stats:
    """The profile of so many requests."""
    port, upstream_port, out = free_port(), free_port(), place / f"{shape.name}.prof"
    log, config = place / f"{shape.name}.log", place / f"{shape.name}.yaml"
    chunks, period = str(shape.chunks or 1), str(shape.period_us)
    upstream = Process(str(place / "upstream"), str(upstream_port), chunks, period, log=log)
    config.write_text(OURS.format(port=port, upstream=upstream_port, place=place, key=KEY, processes=1))
    script = str(HERE / "profiled.py")
    state = {"PENSTOCK_STATE_DIR": str(place / f"state-{port}")}
    process = Process(sys.executable, script, str(out), "serve", "-c", str(config), log=log, **state)
    try:
        wait_answers(place, port, process)
        load(place, port, shape, max(shape.connections, requests // 4))
        os.kill(process.child.pid, signal.SIGUSR1)
        load(place, port, shape, requests)
        os.kill(process.child.pid, signal.SIGUSR2)
        while not out.exists():
            time.sleep(0.05)
        return pstats.Stats(str(out))
    finally:
        process.end()
        upstream.end()


def stages_of(stats: pstats.Stats, requests: int) -> dict[str, float]:
    """The share of each stage in percent, what is left, and calls for each request."""
    spent: dict[str, float] = {}
    for (path, _, name), (_, _, _, cumulative, _) in stats.stats.items():  # type: ignore[attr-defined]
        for known in {each for of in STAGES.values() for part in of for each in part}:
            file, _, function = known.partition(":")
            if function == name and path.endswith(file):
                spent[known] = spent.get(known, 0.0) + cumulative
    total = stats.total_tt  # type: ignore[attr-defined]
    found = {
        stage: sum(spent.get(each, 0.0) for each in holds) - sum(spent.get(each, 0.0) for each in lacks)
        for stage, (holds, lacks) in STAGES.items()
    }
    shares = {stage: round(100 * seconds / total, 1) for stage, seconds in found.items()}
    shares["all else"] = round(100 - sum(shares.values()), 1)
    shares["calls for each request"] = round(stats.total_calls / requests)  # type: ignore[attr-defined]
    return shares


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--shapes", default="whole,paced")
    parser.add_argument("--requests", type=int, default=600)
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="relay-profile-") as name:
        build(Path(name))
        for shape in SHAPES:
            if shape.name in args.shapes.split(","):
                requests = max(shape.connections, args.requests if not shape.period_us else 0)
                short = replace(shape, chunks=min(shape.chunks, 64))
                found[shape.name] = stages_of(profile(short, requests, Path(name)), requests)
    rows = [(stage, *(each[stage] for each in found.values())) for stage in [*STAGES, "all else"]]
    rows.append(("calls for each request", *(each["calls for each request"] for each in found.values())))
    print(table(("percent of the main thread", *found), rows))
    write_result(args.json, {"shares": found})


if __name__ == "__main__":
    main()
