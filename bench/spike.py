"""A spike of one tenant on the real stack: a real gateway and a real engine process, whose steps only last as
long as a model's would.

    python bench/spike.py [--seconds 20] [--repeats 3] [--seed 1] [--out FILE]

Starts `penstock serve` in front of an engine worker with bench/modelled_runner.py (the real scheduler and
protocol; only the forward pass is a sleep), and sends open-loop Poisson traffic of ten tenants through real
sockets: every tenant sends a twentieth of the capacity; then one of them sends twenty times that. Said is how
the TTFT p95 of the other nine compares, as a ratio to the run before.

Answers are of a quarter to seven quarters of the mean length: were all equally long, slots would be given
back in waves.

The client shares the machine with what it measures: it says how late it sent (`send delay`). What overload
does to goodput is measured with the real engine, by bench/overload.py.
"""

import argparse
import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import uvloop
from modelled_runner import Linear, Modelled
from relay_process import free_port

from penstock import rng
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.bench.load import Level, LoadRun, RequestShape
from penstock.bench.prompts import Prompt, PromptPlan, made
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.protocol.address import WorkerLaunch

CLOCK = SystemClock()
TENANTS = 10
SLOTS, FIXED_MS, OUTPUT, WORDS = 64, 20.0, 64, 20
CAPACITY = SLOTS / (OUTPUT * FIXED_MS / 1e3) * 0.95
"""Requests per second that one worker can answer: its slots, over how long one is held; prompts take the
rest."""
START_S = 60.0
HERE = Path(__file__).parent
MODELLED = Modelled(
    speed=Linear(fixed_ns=round(FIXED_MS * 1e6), prefill_ns=25_000),
    num_blocks=65_536,
    max_model_len=32_768,
    first_token=1000,  # From here on: plain text in the demo models' vocabulary.
    num_tokens=64,
)


@dataclass(frozen=True)
class Seen:
    """What one group of tenants saw in one run."""

    offered_per_s: float
    sent: int
    ok: int
    refused: int
    tokens_per_s: float
    """Of answers that ended within the window."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    send_delay_p95_ms: float


class Stack:
    """A worker process and a gateway process, and what it takes to stop them."""

    def __init__(self, place: Path) -> None:
        self._place, self.keys = place, [f"sk-overload-key-{number:02}" for number in range(TENANTS)]
        self._children: list[subprocess.Popen[bytes]] = []
        self.port = free_port()

    def start(self) -> None:
        """Start both and wait until the gateway is ready."""
        address = f"unix:{self._place}/worker.sock"
        engine = EngineSettings(max_running=SLOTS, kv_memory_bytes=1)
        launch = WorkerLaunch(
            model_path="modelled",
            model_name="m",
            address=address,
            hash_key=b"overload" * 4,
            engine=engine,
            runner="modelled_runner:build_runner",
        )
        environment = MODELLED.environment(str(HERE)) | {"PENSTOCK_STATE_DIR": str(self._place / "state")}
        worker = self._run([sys.executable, "-m", "penstock.engine.worker"], environment, stdin=True)
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(launch) + b"\n")
        worker.stdin.flush()
        config = {
            "models": [
                {
                    "path": "penstock-demo-mini",
                    "name": "m",
                    "replicas": 0,
                    "workers": [{"url": address, "engine": "penstock"}],
                }
            ],
            "server": {"port": self.port},
            "auth": {"keys": self.keys},
            "admission": {"ttft_target_ms": 5000},
            "log": {"access": False},
        }
        path = self._place / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML.
        self._run([sys.executable, "-m", "penstock", "serve", "-c", str(path)], environment)
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if time.monotonic() > deadline or any(child.poll() is not None for child in self._children):
                sys.exit(f"the stack did not start; see {self._place}/log")
            time.sleep(0.1)

    def stop(self) -> None:
        """End both."""
        for child in reversed(self._children):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    child.kill()

    def client(self, tenant: int) -> Client:
        """A client with the tenant's key."""
        limits = ClientLimits(request_timeout_s=120)
        return Client(ApiAddress("http", "127.0.0.1", self.port, "/v1"), key=self.keys[tenant], limits=limits)

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return b" 200 " in probe.recv(64)
        except OSError:
            return False

    def _run(
        self, command: list[str], environment: dict[str, str], *, stdin: bool = False
    ) -> subprocess.Popen[bytes]:
        with (self._place / "log").open("ab") as log:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._children.append(child)
        return child


async def drive(stack: Stack, rates: list[float], seconds: float, *, seed: int, run: str) -> list[LoadRun]:
    """Open-loop traffic of every tenant at its rate; returns when every answer has ended."""
    runs: list[LoadRun] = []
    tasks: list[asyncio.Task[None]] = []
    for tenant, rate in enumerate(rates):
        level = Level(name=f"{run}/{tenant}", requests_max=10**9, duration_s=seconds, rate=rate)
        load = LoadRun(
            stack.client(tenant),
            RequestShape(model="m", output_tokens=OUTPUT),
            level,
            seed=seed,
            clock=CLOCK,
        )
        plan = PromptPlan(
            seed=seed,
            run=f"{run}{tenant}",
            prompt_tokens=WORDS,
            shared_tokens=0,
            tokens_per_word=1,
            overhead_tokens=0,
        )
        runs.append(load)
        lengths = rng.stream(seed, f"lengths/{run}/{tenant}")
        prompts = (
            Prompt(prompt.messages, lengths.randint(OUTPUT // 4, OUTPUT * 7 // 4)) for prompt in made(plan)
        )
        tasks.append(asyncio.create_task(load.run(prompts)))
    before, after = await window(runs, seconds)
    await asyncio.gather(*tasks)
    for load, first, last in zip(runs, before, after, strict=True):
        load.tally.output_tokens = last - first  # Those of the window alone.
    return runs


async def window(runs: list[LoadRun], seconds: float) -> tuple[list[int], list[int]]:
    """Answer tokens at a third of the time and at its end: what lies between is the steady state."""
    await asyncio.sleep(seconds / 3)
    before = [load.tally.output_tokens for load in runs]
    await asyncio.sleep(seconds * 2 / 3)
    return before, [load.tally.output_tokens for load in runs]


def seen(runs: list[LoadRun], rates: list[float], seconds: float) -> Seen:
    """The runs of a group taken together; percentiles are medians of the tenants'."""
    tallies = [load.tally for load in runs]
    ttft = [tally.ttft.summary(divisor=1e6) for tally in tallies if tally.ok]
    return Seen(
        offered_per_s=sum(rates),
        sent=sum(tally.sent for tally in tallies),
        ok=sum(tally.ok for tally in tallies),
        refused=sum(tally.failed for tally in tallies),
        tokens_per_s=sum(tally.output_tokens for tally in tallies) / (seconds * 2 / 3),
        ttft_p50_ms=statistics.median(one.p50 for one in ttft),
        ttft_p95_ms=statistics.median(one.p95 for one in ttft),
        tpot_p50_ms=statistics.median(tally.tpot.summary(divisor=1e6).p50 for tally in tallies if tally.ok),
        send_delay_p95_ms=max(tally.send_delay.summary(divisor=1e6).p95 for tally in tallies),
    )


async def measure(stack: Stack, args: argparse.Namespace, number: int) -> dict[str, object]:
    """One repetition."""
    seed, share = args.seed + number, CAPACITY / 20
    await drive(stack, [share] * TENANTS, 6, seed=seed, run=f"warm{number}")
    calm = [share] * TENANTS
    alone = seen(
        (await drive(stack, calm, args.seconds, seed=seed, run=f"calm{number}"))[:-1], calm[:-1], args.seconds
    )
    spike = [share] * (TENANTS - 1) + [20 * share]
    runs = await drive(stack, spike, args.seconds, seed=seed, run=f"spike{number}")
    others, noisy = seen(runs[:-1], spike[:-1], args.seconds), seen(runs[-1:], spike[-1:], args.seconds)
    found: dict[str, object] = {
        "spike": {"alone": asdict(alone), "others": asdict(others), "noisy": asdict(noisy)},
        "others_ttft_p95_ratio": others.ttft_p95_ms / alone.ttft_p95_ms,
    }
    print(
        f"spike: the others' TTFT p95 {alone.ttft_p95_ms:.0f} -> {others.ttft_p95_ms:.0f} ms, "
        f"{others.ttft_p95_ms / alone.ttft_p95_ms:.2f}x; {noisy.ok} of its {noisy.sent} answered", flush=True,
    )  # fmt: skip
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spike-") as name:
        stack = Stack(Path(name))
        stack.start()
        try:
            results = [uvloop.run(measure(stack, args, number)) for number in range(args.repeats)]
        finally:
            stack.stop()
    ratios = [float(str(each["others_ttft_p95_ratio"])) for each in results]
    print(
        f"the others' TTFT p95 under the spike: {statistics.median(ratios):.2f}x "
        f"({min(ratios):.2f}-{max(ratios):.2f})"
    )
    if args.out:
        args.out.write_text(json.dumps({"capacity_per_s": CAPACITY, "repeats": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
