"""Failures nobody notices: real workers behind a real gateway are killed, stopped, cut off and taken away,
under load.

    python -m bench.sockets.failures [--model penstock-demo-mini] [--replicas 3] [--repeats 5] [--kills 10]
                                     [--scale-ins 50] [--out FILE]

detect      from the fault to the end of the stream that it hit: kill -9, SIGSTOP, a black hole in a proxy
kills       workers are killed one after the other while clients stream: requests lost, and answers that are
            not those of an undisturbed run of the same requests (greedy and sampled)
scale-ins   workers are drained and come back while clients stream: streams aborted, answers that differ
offered     a minute on virtual time with three of ten workers failing everything: attempts per request, with
            the health parts and, as the baseline in the same run, with as many retries for everybody
"""

import argparse
import asyncio
import io
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import openai
import uvloop
from fault_proxy import fault_proxy

from bench.harness import command_line
from penstock.backends.base import Delta, Finish, GenerateRequest
from penstock.backends.engine.backend import EngineBackend
from penstock.cli.wiring.wire import Stack
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.fleet import HealthConfig
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import AuthConfig, Config, EngineConfig, LogConfig, ModelConfig, ServerConfig
from penstock.errors import WorkerUnavailable
from penstock.fleet.launchers.base import LaunchedWorker
from penstock.fleet.launchers.process import Spares
from penstock.fleet.launchers.supervised import SupervisedWorker
from penstock.policy.contracts import Health
from penstock.policy.flow import Outcome, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import AllHealthy, Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.resilience.health import FleetHealth
from penstock.policy.terms import QueueTerms
from penstock.protocol.address import parse_address
from penstock.rng import stream
from penstock.telemetry.log import Log
from penstock.types import RequestId, SamplingParams, Usage, WorkerId

KEY = "sk-bench-failures-0123456789"
PROMPTS = tuple(
    f"Write a story about {what}." for what in ("a pump", "two ships", "the sea", "a clock", "rain", "a fox")
)


@dataclass
class Load:
    """Clients that ask the same requests again and again, and what came of it."""

    client: openai.AsyncOpenAI
    model: str
    max_tokens: int
    expected: dict[int, str] = field(default_factory=dict[int, str])
    asked: int = 0
    different: int = 0
    errors: list[str] = field(default_factory=list[str])

    async def ask(self, number: int) -> str:
        """Request `number` of the fixed set; even ones are greedy, odd ones sampled."""
        pieces = list[str]()
        answer = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": PROMPTS[number // 2]}],
            temperature=0.8 * (number % 2),
            seed=number,
            max_tokens=self.max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
        return "".join(pieces)

    async def learn(self) -> None:
        """The answer to every request when nothing happens."""
        for number in range(2 * len(PROMPTS)):
            self.expected[number] = await self.ask(number)

    async def _client(self, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.asked += 1
            try:
                text = await self.ask(number)
            except openai.OpenAIError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            else:
                self.different += text != self.expected[number]
            number = (number + 5) % len(self.expected)

    @asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        """So many clients at once, until the block ends; then their last answers are awaited."""
        self.asked, self.different, self.errors = 0, 0, []
        stop = asyncio.Event()
        tasks = [asyncio.create_task(self._client(i % len(self.expected), stop)) for i in range(clients)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    def result(self, **facts: object) -> dict[str, object]:
        """Of the last run."""
        return {**facts, "requests": self.asked, "lost": len(self.errors), "different": self.different,
                "first_errors": self.errors[:3]}  # fmt: skip


class Sink:
    """Notes when a stream begins and ends."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.ended_at = 0.0

    def on_delta(self, delta: Delta) -> None:
        self.began.set()

    def on_finish(self, finish: Finish) -> None:
        self.ended_at = time.perf_counter()
        self.ended.set()


async def all_ready(stack: Stack) -> list[LaunchedWorker]:
    """The launched workers, once every one of them answers."""
    workers = list(stack._launcher.list())
    for worker in workers:
        await worker.wait_ready()
    return workers


async def one_loss(backend: EngineBackend, number: int, lose: Callable[[], object]) -> float:
    """Seconds from `lose` to the end of a stream on this backend."""
    sink = Sink()
    backend.generate(
        GenerateRequest(
            request_id=RequestId(f"detect-{number}"),
            prompt_token_ids=(5, 6, 7),
            sampling=SamplingParams(temperature=1.0, seed=number, max_tokens=100_000),
        ),
        sink,
    )
    await sink.began.wait()
    started = time.perf_counter()
    lose()
    await sink.ended.wait()
    return sink.ended_at - started


def pid_of(worker: LaunchedWorker) -> int:
    """Of a worker that this machine runs."""
    assert isinstance(worker, SupervisedWorker), worker
    assert worker.pid is not None, "it is ready"
    return worker.pid


async def detect(stack: Stack, tokenizer: object, repeats: int) -> dict[str, object]:
    """Seconds until each kind of loss is noticed."""
    found: dict[str, list[float]] = {"kill -9": [], "SIGSTOP": [], "black hole": []}
    for number in range(repeats):
        for how in (signal.SIGKILL, signal.SIGSTOP):
            worker = (await all_ready(stack))[number % 2]
            pid = pid_of(worker)
            took = await one_loss(worker.backend, number, lambda pid=pid, how=how: os.kill(pid, how))
            found["kill -9" if how is signal.SIGKILL else "SIGSTOP"].append(took)
            if how is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        worker = (await all_ready(stack))[number % 2]
        async with fault_proxy(parse_address(str(worker.address))) as proxy:
            backend = EngineBackend(tokenizer, SystemClock())
            backend.connect_to(proxy.address)
            while not backend.status.ready:
                await asyncio.sleep(0.01)
            found["black hole"].append(await one_loss(backend, number, proxy.black_hole))
            await backend.close()
    return {
        how: {"median_s": round(median(took), 4), "max_s": round(max(took), 4)} for how, took in found.items()
    }


async def kills(stack: Stack, load: Load, clients: int, count: int) -> dict[str, object]:
    """Kill a worker that has streams, `count` times, and let it come back before the next."""
    chance, hit = random.Random(1), 0
    async with load.running(clients):
        for _ in range(count):
            workers = await all_ready(stack)
            await asyncio.sleep(chance.uniform(0.5, 1.5))
            busy = [worker for worker in workers if worker.backend.num_streams] or workers
            victim = chance.choice(busy)
            hit += victim.backend.num_streams
            os.kill(pid_of(victim), signal.SIGKILL)
            await asyncio.sleep(0.2)
    return load.result(kills=count, streams_hit=hit)


async def scale_ins(stack: Stack, load: Load, clients: int, count: int) -> dict[str, object]:
    """Take a worker away and bring it back, `count` times."""
    (part,), (model,) = stack._parts, stack._config.models
    source, hit = f"models.{part.served.name}", 0
    async with load.running(clients):
        for number in range(count):
            await all_ready(stack)
            wanted = stack._wanted(model, part)
            leaving = wanted[number % len(wanted)]
            worker = stack._registry.get(leaving.id)
            hit += worker.backend.num_streams
            await stack._members.apply(source, [each for each in wanted if each is not leaving])
            await worker.drained
            await stack._members.apply(source, wanted)
    return load.result(scale_ins=count, streams_hit=hit)


def offered(*, with_health: bool) -> dict[str, object]:
    """A hundred requests a second for a minute; workers 0 to 2 of ten fail whatever they are given."""
    health: Health = (
        FleetHealth(HealthConfig(), stream(1, "breakers").random) if with_health else AllHealthy()
    )
    control = FlowControl(QueueTerms(worker_credit=0), Policies(health=health))
    for i in range(10):
        control.set_worker(0, "m", WorkerId(f"w{i}"), WorkerView(max_running=8))
    attempts = lost = 0
    for number in range(6000):
        now_ns = number * NS_PER_S // 100
        request_id = RequestId(f"r{number}")
        control.arrive(now_ns, RequestFacts(id=request_id, route="m", prompt_tokens=16, max_tokens=16))
        while starts := [each for each in control.dispatch(now_ns) if isinstance(each, Start)]:
            for each in starts:
                attempts += 1
                if each.worker_id in ("w0", "w1", "w2"):
                    answer = control.failed(now_ns, each.id, WorkerUnavailable("it fails"), retry=True)
                    lost += hasattr(answer, "outcome")
                else:
                    control.first_output(now_ns, each.id)
                    control.ended(now_ns, each.id, Outcome.FINISHED, Usage(completion_tokens=1))
    return {"requests": 6000, "attempts_per_request": round(attempts / 6000, 3), "lost": lost}


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """All parts, one after the other."""
    config = Config(
        server=ServerConfig(port=0),
        auth=AuthConfig(keys=(KEY,)),
        models=(
            ModelConfig(
                path=options.model,
                name="demo",
                replicas=options.replicas,
                engine=EngineConfig(threads=1, kv_memory_bytes=64 * 1024 * 1024),
            ),
        ),
        ledger=LedgerConfig(enabled=False),
        log=LogConfig(),
    )
    with io.StringIO() as nowhere:
        stack = Stack(config, SystemClock(), Log(config.log, SystemClock(), stream=nowhere), Spares())
        host, port = await stack.start()
        try:
            await all_ready(stack)
            async with openai.AsyncOpenAI(
                base_url=f"http://{host}:{port}/v1", api_key=KEY, max_retries=0, timeout=120
            ) as client:
                load = Load(client, "demo", options.max_tokens)
                await load.learn()
                tokenizer = stack._parts[0].served.tokenizer
                return {
                    "kills": await kills(stack, load, options.clients, options.kills),
                    "scale_ins": await scale_ins(stack, load, options.clients, options.scale_ins),
                    "detect": await detect(stack, tokenizer, options.repeats),
                    "offered": {
                        "with_health": offered(with_health=True),
                        "baseline": offered(with_health=False),
                    },
                }
        finally:
            await stack.abort()


def main() -> None:
    """Run and print; `--out` also writes the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="penstock-demo-mini")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--scale-ins", type=int, default=50)
    options = parser.parse_args()
    found = uvloop.run(measure(options))
    found["options"] = {name: value for name, value in vars(options).items() if name != "out"}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
