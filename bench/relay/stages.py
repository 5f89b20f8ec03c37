"""Where does a relayed request's CPU go, and what does it cost in another tree? Shares by stage, or ratios.

    python -m bench.relay.stages [--shapes whole,paced] [--requests 600] [--json FILE]
    python -m bench.relay.stages --tree . OLD [--instructions] [--turns 20]      beside another source tree

`penstock serve` stands in front of an HTTP worker. Shares are of the main thread's time in Python and in what
Python calls, by cProfile, which makes calls dearer than they are: shares tell where to look, and `calls` (of
functions, C's included) for each request are the same on every machine. The kernel's part, in `write` and in
the event loop, is not told apart.

With `--tree` the last one is what the others are held against; `PYTHON@TREE` runs one with another Python, of
this version or with Penstock's packages, and `penstock.vllm:TREE` (or `:PYTHON@TREE`) one that is configured
as that gateway of bench/relay/peers.py: it gets token ids. CPU time of all threads, in short bursts that go
to one and the other in turns (median of the ratios, with quartiles), and with `--instructions` those of the
processor (valgrind's callgrind), which are the same however busy the machine is. Under valgrind requests come
so slowly that what is done by the clock (learning, the pulse) counts with each, in both trees.
"""

import os
import pstats
import re
import signal
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.harness import command_line, in_turns, table, write_result
from bench.process import Process, build, needed
from bench.relay.gateways import SHAPES, Gateway, Shape, load, serving

PATIENCE_S = 400.0
"""Until a gateway in valgrind answers."""
PROFILED = """
import cProfile, os, signal, sys, time
from penstock.cli.main import main
out, profile = sys.argv.pop(1), cProfile.Profile(time.thread_time)
def stop(*_):
    profile.disable()
    profile.dump_stats(out + ".part")
    os.rename(out + ".part", out)
signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
signal.signal(signal.SIGUSR2, stop)
sys.exit(main())
"""
"""`penstock`: its main thread's CPU between two signals goes to a file, which is named once whole."""

STAGES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reading the request, who asks": (("http/connection.py:data_received",), ("http/begun.py:begin",)),
    "parsing it": (("openai_validate.py:parse_chat",), ()),
    "the chat template": (("text/chat.py:render_values", "text/outline.py:prompt"), ()),
    "tokenizing": (("text/tokenizer.py:encode",), ()),
    "limits, admission, queue": (("lifecycle/control.py:arrive",), ()),
    "the ledger": (
        tuple(f"telemetry/ledger.py:{name}" for name in ("open", "slice", "close", "close_soon", "flush")), ()
    ),
    "the rest of preparing and submitting": (
        ("api/generate.py:answer_chat",),
        (
            "openai_validate.py:parse_chat", "text/chat.py:render_values", "text/outline.py:prompt",
            "text/tokenizer.py:encode", "lifecycle/control.py:arrive", "telemetry/ledger.py:open",
        ),
    ),
    "placing": (("lifecycle/control.py:dispatch",), ()),
    "sending it to the worker": (("http/backend.py:generate",), ()),
    "reading the answer": (
        ("http/client.py:data_received",),
        ("relay.py:on_delta", "collect.py:on_delta", "relay.py:on_finish", "collect.py:on_finish"),
    ),
    "learning from the first output": (("lifecycle/control.py:first_output", "queueing/pace.py:learn"), ()),
    "settling at the end": (("lifecycle/control.py:ended",), ()),
    "metrics, history, access log": (("gateway/endings.py:tell",), ()),
    "writing to the client": (("http/connection.py:write",), ()),
}  # fmt: skip
"""Of each, functions whose time is in it with all that they call, and those of them that are not."""


def of_tree(name: str) -> Gateway:
    """A source tree's `penstock`: [KIND:][PYTHON@]TREE."""
    kind, _, where = name.rpartition(":")
    python, _, tree = where.rpartition("@")
    return Gateway(kind or "penstock.http", python, Path(tree).resolve())


def profile(shape: Shape, requests: int, place: Path) -> pstats.Stats:
    """The profile of so many requests."""
    out = place / f"{shape.name}.prof"
    gateway = Gateway("penstock.http", program=("-c", PROFILED, str(out)))
    with serving(gateway, shape, place) as (port, process):
        load(place, port, shape, requests // 4)
        os.kill(process.child.pid, signal.SIGUSR1)
        load(place, port, shape, requests)
        os.kill(process.child.pid, signal.SIGUSR2)
        while not out.exists():
            time.sleep(0.05)
        return pstats.Stats(str(out))


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


def instructions(tree: str, shape: Shape, requests: int, place: Path) -> float:
    """Of the processor, in all threads, for each request."""
    out = place / "callgrind"
    tool = (needed("valgrind"), "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}")
    with serving(of_tree(tree)._replace(tool=tool), shape, place, patience_s=PATIENCE_S) as (port, process):

        def control(*order: str) -> None:
            command = ["callgrind_control", *order, str(process.child.pid)]
            subprocess.run(command, check=True, capture_output=True)

        load(place, port, shape, shape.connections)
        control("-i", "on")
        load(place, port, shape, requests)
        control("-i", "off")
        control("-d")
    dumps = [path.read_text() for path in place.glob("callgrind*")]
    counts = [int(found[1]) for text in dumps for found in re.finditer(r"^totals: (\d+)", text, re.MULTILINE)]
    for path in place.glob("callgrind*"):
        path.unlink()
    return sum(counts) / requests


def in_bursts(
    trees: Sequence[str], shape: Shape, requests: int, turns: int, place: Path
) -> list[list[tuple[float, float]]]:
    """By tree and turn: CPU of all threads for each request and the p99 of their times, in microseconds."""

    def burst(port: int, process: Process) -> tuple[float, float]:
        before_s = process.cpu_exact_s()
        p99_us = load(place, port, shape, requests)["total_p99_us"]
        return (process.cpu_exact_s() - before_s) / requests * 1e6, p99_us

    with ExitStack() as stack:
        running = [stack.enter_context(serving(of_tree(tree), shape, place)) for tree in trees]
        for port, _ in running:
            load(place, port, shape, shape.connections)
        kinds = {str(number): partial(burst, *each) for number, each in enumerate(running)}
        return list(in_turns(turns, kinds).values())


def beside(shape: Shape, requests: int, place: Path, args: Namespace) -> dict[str, object]:
    """The cost of a shape in each tree."""
    found = dict[str, object]()
    if args.instructions:
        counts = [instructions(tree, shape, requests, place) for tree in args.tree]
        found["instructions"] = [round(count) for count in counts]
        shown = f"{', '.join(f'{count / 1e6:.3f}' for count in counts)} million instructions a request"
        print(f"{shape.name}: {shown}, ratio {counts[0] / counts[-1]:.3f}", flush=True)
    if args.turns:
        bursts = in_bursts(args.tree, shape, requests, args.turns, place)
        cpu, p99 = ([[each[i] for each in tree] for tree in bursts] for i in (0, 1))
        ratios = [[a / b for a, b in zip(each, cpu[-1], strict=True)] for each in cpu[:-1]]
        found["cpu_us"] = [round(statistics.median(each), 1) for each in cpu]
        found["ratio_quartiles"] = [[round(q, 3) for q in statistics.quantiles(each, n=4)] for each in ratios]
        found["p99_us"] = [round(statistics.median(each)) for each in p99]
        print(f"{shape.name}: {found}", flush=True)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", default="whole,paced")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--tree", nargs="*", default=[], help="the last is held against")
    parser.add_argument("--chunks", type=int, default=64, help="of a streamed answer, at most")
    parser.add_argument("--turns", type=int, default=0, help="bursts of CPU time")
    parser.add_argument("--instructions", action="store_true", help="with valgrind: a minute for each tree")
    args = parser.parse_args()
    costs: dict[str, object] = {}
    shares: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="relay-profile-") as name:
        build(Path(name))
        for shape in [each for each in SHAPES if each.name in args.shapes.split(",")]:
            requests = max(shape.connections, args.requests if not shape.period_us else 0)
            short = replace(shape, chunks=min(shape.chunks, args.chunks))
            if args.tree:
                costs[shape.name] = beside(short, requests, Path(name), args)
            else:
                shares[shape.name] = stages_of(profile(short, requests, Path(name)), requests)
    if args.tree:
        write_result(args.json, {"trees": args.tree, "costs": costs})
        return
    rows = [(stage, *(each[stage] for each in shares.values())) for stage in [*STAGES, "all else"]]
    rows.append(("calls for each request", *(each["calls for each request"] for each in shares.values())))
    print(table(("percent of the main thread", *shares), rows))
    write_result(args.json, {"shares": shares})


if __name__ == "__main__":
    main()
