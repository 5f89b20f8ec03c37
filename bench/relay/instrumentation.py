"""The cost of instrumentation: CPU of the gateway per request and of the engine's thread per step, with it
and without.

    python -m bench.relay.instrumentation [--streams 400] [--tokens 80] [--turns 30] [--rounds 5]
        [--engine-rounds 5] [--instructions] [--engine-instructions] [--model DIR] [--json FILE]

Both sides run the same program: waves of requests of one gateway in turn, runs of steps of one batch in
turn (with `--rounds`, two gateways at the same time besides, which differ by more than what is measured).
"Without" replaces, in this process only, what is there to be looked at: metrics, history, recent requests,
decisions and traces in the gateway; the shares of time, the cost floor and the sums of steps in the engine.
Work that a request pays for or its answer needs stays: the ledger, limits, placement. Traces are exported
to a collector of this script that takes everything, before the next wave begins.

Prints one JSON object: of each round or turn both sides; the median of what instrumentation adds, and the
best rounds. `--instructions` counts the processor's instructions per request too (valgrind's cachegrind, the
difference of two numbers of streams): the same whatever else the machine does, where seconds are not.
`--engine-instructions` does so for what an engine's step has of Python, with a runner that computes nothing:
`added` is the number of instructions that the instruments take of each step.
"""

import asyncio
import inspect
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, cast

import uvloop

from bench.harness import command_line, write_result
from bench.relay import cost as relay_cost
from bench.relay.cost import Load, run_client
from bench.sim import modelled_runner
from penstock.backends.base import Finish
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import Config, EngineConfig, TracesConfig
from penstock.engine.core import StepRunner, build_core
from penstock.gateway.api.services import RecentRequests
from penstock.gateway.tracing import RequestTraces
from penstock.kv.hashing import token_bytes
from penstock.planning.roofline import MODELS, CostFloor, Placed, accelerator
from penstock.policy.admission.admit import Promises
from penstock.policy.placement.pick import DecisionLog
from penstock.protocol.worker import Stats, Submit
from penstock.telemetry.history import Recorder
from penstock.telemetry.instruments import Counter, Gauge, Histogram
from penstock.telemetry.metrics import Metrics, ModelMetrics
from penstock.telemetry.traces import TraceKeeper
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId, SamplingParams, Usage

SIDES = ("with", "without")
RATE = 50.0
COUNTED_RATE = 4.0
"""Tokens per second of a stream while instructions are counted: a gateway in valgrind is fifty times slower,
and still has to send each token by itself.
"""
COUNTED_STREAMS = (20, 120)
ROWS, RUN_STEPS, RUNS, WARM_STEPS = 16, 16, 16, 8
"""Steps are counted several at a time, so a run of them on one side is as long as a few of those times."""
COUNTED_STEPS = (64, 576)


class NoMetrics:
    """Stands for `Metrics`, and for everything in it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> "NoMetrics":
        return self

    def __call__(self, *_: object, **__: object) -> "NoMetrics":
        return self

    def render(self) -> bytes:
        return b""


def nothing(*_: object, **__: object) -> None:
    """Called in place of the code that counts."""


def no_gateway_instruments() -> None:
    relay_cost.Metrics = NoMetrics
    for owner, name in ((Recorder, "ended"), (RecentRequests, "add"), (DecisionLog, "add")):
        setattr(owner, name, nothing)


# --- one gateway, waves in turn ------------------------------------------------------------------

SETTLE_S = 0.5
"""Behind a wave and the export of its traces."""
_HANDLES = ("model", "anomalies", "backend", "render", "mbu")
"""Of metrics, what gives something back."""


def instruments() -> list[tuple[type, str]]:
    """What "without" replaces while the gateway runs."""
    counts = [
        (owner, name)
        for owner in (Metrics, ModelMetrics)
        for name, each in vars(owner).items()
        if inspect.isfunction(each) and not name.startswith("_") and name not in _HANDLES
    ]
    values = [(kind, name) for kind in (Counter, Gauge, Histogram) for name in ("inc", "set", "observe")]
    return [
        *counts, *(each for each in values if hasattr(*each)), (Recorder, "ended"), (RecentRequests, "add"),
        (DecisionLog, "add"), (RequestTraces, "begin"),
    ]  # fmt: skip


class Waves(relay_cost.Pusher):
    """Pushes wave after wave; each is told with the CPU that it took, before the next one begins. Waves
    without instruments are every other one, in the order of A B B A.
    """

    num_waves: ClassVar[int]
    pipe: ClassVar[Connection]
    """Both are set before the gateway starts."""
    keepers: ClassVar[list[TraceKeeper]] = []
    recorders: ClassVar[list[Recorder]] = []

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._real = {each: getattr(*each) for each in instruments()}
        self._number, self._reported_s = 0, time.process_time()

    def _end(self) -> None:
        for sink in self._sinks:
            sink.on_finish(Finish(reason=FinishReason.STOP, usage=Usage()))
        self._sinks.clear()
        self._settling = asyncio.get_running_loop().create_task(self._settle())

    async def _settle(self) -> None:
        """Traces are exported once in each wave, more often than the gateway does it by itself, and what has
        ended is counted.
        """
        await asyncio.sleep(SETTLE_S)
        for recorder in self.recorders:
            recorder.count()
        for keeper in self.keepers:
            while keeper._pending:
                await keeper._export()
        await asyncio.sleep(SETTLE_S)
        used_s = time.process_time() - self._reported_s
        side = SIDES[self._side]
        self._number += 1
        for (owner, name), real in self._real.items():
            setattr(owner, name, nothing if SIDES[self._side] == "without" else real)
        if self._number == self.num_waves:
            self.done.set()
        self._reported_s = time.process_time()
        self.pipe.send((side, used_s / self._load.streams * 1e6))

    @property
    def _side(self) -> int:
        return (self._number + 1) // 2 % 2


def run_waves(load: Load, num_waves: int, collector: int, pipe: Connection) -> None:
    endpoint = f"http://127.0.0.1:{collector}/v1/traces"
    relay_cost.Config = partial(Config, traces=TracesConfig(endpoint=endpoint, slow_ms=0))
    relay_cost.Pusher, Waves.num_waves, Waves.pipe = Waves, num_waves, pipe
    start, make = TraceKeeper.start, Recorder.__init__

    def remember_recorder(self: Recorder, promises: Promises, metrics: Metrics) -> None:
        Waves.recorders.append(self)
        make(self, promises, metrics)

    Recorder.__init__ = remember_recorder

    def remember(self: TraceKeeper) -> None:
        Waves.keepers.append(self)
        start(self)

    TraceKeeper.start = remember
    uvloop.run(relay_cost.serve_gateway(load, pipe))


def run_wave_clients(port: int, load: Load, num_waves: int, pipe: Connection) -> None:
    for _ in range(num_waves):
        pipe.recv()
        run_client(port, load, pipe)


def waves_us(load: Load, turns: int, collector: int) -> list[dict[str, float]]:
    """CPU microseconds per request of one gateway, in turns of a wave with and one without. The first two
    waves do not count.
    """
    context, num_waves = multiprocessing.get_context("spawn"), 2 * turns + 2
    ours, theirs = context.Pipe()
    server = context.Process(target=run_waves, args=(load, num_waves, collector, theirs))
    server.start()
    port = ours.recv()
    near, far = context.Pipe()
    client = context.Process(target=run_wave_clients, args=(port, load, num_waves, far))
    client.start()
    reported = list[tuple[str, float]]()
    for _ in range(num_waves):
        near.send("begin")
        events = near.recv()
        assert events >= load.streams * load.ticks, f"{events} events arrived"
        reported.append(ours.recv())
    client.join()
    ours.recv()
    server.join()
    return [dict(reported[i : i + 2]) for i in range(2, num_waves, 2)]


# --- two gateways at once ------------------------------------------------------------------------


class CpuPipe:
    """Between the gateway and the run: CPU from the run's word to begin until its answers have ended."""

    def __init__(self, pipe: Connection, load: Load) -> None:
        self._pipe, self._load, self._cpu_s = pipe, load, 0.0

    def send(self, found: object) -> None:
        if isinstance(found, dict):
            used_s = time.process_time() - self._cpu_s
            found = {"us_per_request": used_s / self._load.streams * 1e6}
        self._pipe.send(found)
        if isinstance(found, int):  # Its port.
            self._pipe.recv()
            self._cpu_s = time.process_time()


def run_gateway(side: str, load: Load, collector: int, pipe: Connection) -> None:
    if side == "without":
        no_gateway_instruments()
    else:
        endpoint = f"http://127.0.0.1:{collector}/v1/traces"
        # Streams that come all at once wait for each other, on a busy machine for longer than `slow_ms`, and
        # then all of them would be traced: here it is the configured share at any time.
        relay_cost.Config = partial(Config, traces=TracesConfig(endpoint=endpoint, slow_ms=0))
    uvloop.run(relay_cost.serve_gateway(load, CpuPipe(pipe, load)))


def gateways_us(load: Load, collector: int, order: Sequence[str]) -> dict[str, float]:
    """CPU microseconds per request of both sides, which run at the same time: whatever else the machine does
    then, it does to both. They begin in this order.
    """
    context = multiprocessing.get_context("spawn")
    servers = dict[str, tuple[BaseProcess, Connection, int]]()
    for side in order:
        ours, theirs = context.Pipe()
        server = context.Process(target=run_gateway, args=(side, load, collector, theirs))
        server.start()
        servers[side] = (server, ours, ours.recv())
    clients = dict[str, tuple[BaseProcess, Connection]]()
    for side, (_, pipe, port) in servers.items():
        near, far = context.Pipe()
        client = context.Process(target=run_client, args=(port, load, far))
        clients[side] = (client, near)
        pipe.send("begin")
    for client, _ in clients.values():
        client.start()
    found = dict[str, float]()
    for side, (server, pipe, _) in servers.items():
        client, near = clients[side]
        found[side], events = pipe.recv()["us_per_request"], near.recv()
        server.join()
        client.join()
        assert events >= load.streams * load.ticks, f"{side}: {events} events arrived"
    return found


def gateway_instructions(side: str, tokens: int, collector: int) -> dict[str, float]:
    """Instructions of a gateway per request, and per request that sends one token only."""
    per_request = dict[str, float]()
    for name, ticks in (("whole", tokens), ("first_token", 1)):
        few, many = (
            counted(side, Load(n, COUNTED_RATE, ticks / COUNTED_RATE), collector) for n in COUNTED_STREAMS
        )
        per_request[name] = (many - few) / (COUNTED_STREAMS[1] - COUNTED_STREAMS[0])
    return per_request


def counted(side: str, load: Load, collector: int) -> int:
    """Instructions of a gateway process that serves this load, its start included."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="instructions-") as place:
        valgrind, out = Path(place, "python"), Path(place, "counted")
        tool = f"valgrind --tool=cachegrind --cache-sim=no --cachegrind-out-file={out} -q"
        valgrind.write_text(f'#!/bin/sh\nPYTHONHASHSEED=0 exec {tool} {sys.executable} "$@"\n')
        valgrind.chmod(0o700)
        context.set_executable(str(valgrind))
        ours, theirs = context.Pipe()
        server = context.Process(target=run_gateway, args=(side, load, collector, theirs))
        server.start()
        context.set_executable(sys.executable)
        port = ours.recv()
        ours.send("begin")
        near, far = context.Pipe()
        client = context.Process(target=run_client, args=(port, load, far))
        client.start()
        ours.recv()
        near.recv()
        client.join()
        server.join()
        return int(out.read_text().rstrip().rpartition("summary:")[2])


class Collector(BaseHTTPRequestHandler):
    """Takes every trace."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


def collector_port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


# --- the engine ----------------------------------------------------------------------------------


class NoMeters:
    """Stands for an engine's meters and sums of steps, and counts nothing."""

    memory_ns = floor_ns = kv_held_tokens = 0
    step_over = count = add = staticmethod(nothing)

    def __getattr__(self, name: str) -> int:
        return 0


def real_runner(model: Path, config: EngineConfig) -> StepRunner:
    """The runner of a checkpoint."""
    from penstock.engine.runner import load_runner

    return load_runner(model, config, lambda *_: None)


def no_runner(config: EngineConfig) -> StepRunner:
    """A runner that takes no time, and knows the floor of a model as the real one does."""
    speed = modelled_runner.Linear(fixed_ns=0, prefill_ns=0)
    modelled = modelled_runner.Modelled(speed=speed, num_blocks=2048, max_model_len=4096)
    runner = modelled_runner.ModelledRunner(modelled, config.max_running, SystemClock())
    placed = Placed(model=MODELS["28m"], device=accelerator("cpu-2"))
    cast(Any, runner).floor = CostFloor(placed, rows=ROWS, kv_tokens=2048 * BLOCK_TOKENS)
    return runner


class Engine:
    """A full batch that decodes.

    Instruments are exchanged in objects and not in classes: a class that changes makes the interpreter forget
    what it has learned about its methods, and both sides would pay for that.
    """

    def __init__(self, make_runner: Callable[[EngineConfig], StepRunner]) -> None:
        config = EngineConfig(max_running=ROWS)
        runner = make_runner(config)
        runner.warm_up()
        self._core = build_core(runner, EngineSettings.of(config), b"k" * 32, SystemClock())
        self._prefill = self._core._scheduler._prefill
        self._instruments = {
            "with": (self._core._meters, self._prefill.sums), "without": (NoMeters(), NoMeters()),
        }  # fmt: skip
        self._number = 0

    def _use(self, side: str) -> None:
        self._core._meters, self._prefill.sums = self._instruments[side]

    def _begin(self, num_steps: int) -> None:
        for _ in range(ROWS):
            self._number += 1
            prompt = token_bytes([100 + (self._number * 7 + i) % 800 for i in range(48)])
            sampling = SamplingParams(max_tokens=num_steps + 2 * WARM_STEPS, temperature=0.0)
            message = Submit(request_id=RequestId(f"r{self._number}"), prompt=prompt, sampling=sampling)
            self._core.submit(1, message, time.monotonic_ns())
        self._use("with")
        self._run("with", WARM_STEPS)

    def _run(self, side: str, num_steps: int) -> None:
        """As a worker does: what it publishes now and then is made by the side with instruments."""
        core = self._core
        for _ in range(num_steps):
            core.step()
            if side == "with":
                core.due_stats()

    def _end(self) -> None:
        core = self._core
        self._use("with")
        core.abort(1, tuple(RequestId(f"r{self._number - i}") for i in range(ROWS)))
        while core.has_work:
            core.step()
        assert isinstance(core.stats(), Stats)

    def block(self) -> dict[str, float]:
        """CPU microseconds of the engine's own thread per step, the median of the runs of each side. Runs
        come in the order A B B A: contexts grow, and steps with them.
        """
        self._begin(RUN_STEPS * RUNS)
        took: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(RUNS):
            side = SIDES[(number + 1) // 2 % 2]
            self._use(side)
            started_ns = time.thread_time_ns()
            self._run(side, RUN_STEPS)
            took[side].append((time.thread_time_ns() - started_ns) / RUN_STEPS / 1000)
        self._end()
        return {side: statistics.median(each) for side, each in took.items()}

    def steps(self, side: str, num_steps: int) -> None:
        """So many steps on one side, to be counted."""
        self._begin(num_steps)
        self._use(side)
        self._run(side, num_steps)
        self._end()


def engine_instructions() -> dict[str, float]:
    """The processor's instructions per step of both sides, without a model."""
    found = dict[str, float]()
    for side in SIDES:
        few, many = (counted_steps(side, num_steps) for num_steps in COUNTED_STEPS)
        found[side] = (many - few) / (COUNTED_STEPS[1] - COUNTED_STEPS[0])
    return found | {"added": found["with"] - found["without"]}


def counted_steps(side: str, num_steps: int) -> int:
    """Instructions of a process that does so many steps."""
    with tempfile.NamedTemporaryFile(prefix="instructions-") as out:
        subprocess.run(
            [
                "valgrind", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={out.name}", "-q",
                sys.executable, "-m", "bench.relay.instrumentation", "--count-side", side,
                "--count-steps", str(num_steps),
            ],
            check=True, env=os.environ | {"PYTHONHASHSEED": "0"},
        )  # fmt: skip
        return int(Path(out.name).read_text().rstrip().rpartition("summary:")[2])


# --- the run -------------------------------------------------------------------------------------


def paired(rounds: int, measure: Callable[[int], dict[str, float]]) -> dict[str, Any]:
    """Rounds of both sides, and the median of what instrumentation adds."""
    found = list[dict[str, float]]()
    for number in range(rounds):
        sides = measure(number)
        found.append(sides | {"added": sides["with"] / sides["without"] - 1})
        print(json.dumps(found[-1]), file=sys.stderr)
    if not found:
        return {"rounds": found}
    # Other work on the machine only adds: the best round of each side is what the program itself needs.
    best = {side: min(each[side] for each in found) for side in SIDES}
    return {
        "rounds": found,
        "added_median": statistics.median(each["added"] for each in found),
        "best": best | {"added": best["with"] / best["without"] - 1},
    }


def turns_report(turns: list[dict[str, float]]) -> dict[str, Any]:
    """What turns say: each turn's two waves beside one another, and the quiet waves of each side."""
    added = sorted(each["with"] / each["without"] - 1 for each in turns)
    quiet = {side: statistics.quantiles([each[side] for each in turns], n=10)[0] for side in SIDES}
    low, middle, high = statistics.quantiles(added, n=4)
    return {
        "turns": turns, "added_median": middle, "added_quartiles": [low, high],
        "tenth_percentile": quiet | {"added": quiet["with"] / quiet["without"] - 1},
    }  # fmt: skip


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--engine-rounds", type=int, default=5)
    parser.add_argument("--instructions", action="store_true", help="with valgrind: minutes")
    parser.add_argument("--engine-instructions", action="store_true", help="with valgrind: minutes")
    parser.add_argument(
        "--count-side", choices=SIDES, help="what a process in valgrind does, of --count-steps"
    )
    parser.add_argument("--count-steps", type=int, default=0)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "models" / "penstock-demo")
    args = parser.parse_args()
    if args.count_side:
        Engine(no_runner).steps(args.count_side, args.count_steps)
        return 0
    load, port = Load(args.streams, RATE, args.tokens / RATE), collector_port()
    engine = Engine(partial(real_runner, args.model)) if args.engine_rounds else None
    if engine is not None:
        engine.block()

    def gateways(number: int) -> dict[str, float]:
        return gateways_us(load, port, SIDES if number % 2 else SIDES[::-1])

    result: dict[str, Any] = {
        "engine_us_per_step": paired(
            args.engine_rounds, lambda _: engine.block() if engine is not None else {}
        ),
        "gateway_us_per_request": paired(args.rounds, gateways),
    }
    if args.turns > 1:
        result["gateway_in_turns_us_per_request"] = turns_report(waves_us(load, args.turns, port))
    if args.instructions:
        both = {side: gateway_instructions(side, args.tokens, port) for side in SIDES}
        added = {name: both["with"][name] / both["without"][name] - 1 for name in both["with"]}
        result["gateway_instructions_per_request"] = both | {"added": added}
    if args.engine_instructions:
        result["engine_instructions_per_step"] = engine_instructions()
    print(json.dumps(result))
    if args.json:
        write_result(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
