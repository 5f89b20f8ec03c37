"""Load over sockets and in the simulator, with the same arrivals, configuration and law of step times:
sockets_and_sim.py runs and prints it.

overload        twice what a worker of ours can answer, of three tenants and a fourth one in the band
                "priority"
overload, two   the same with two gateway processes
flood           one tenant's 32 streams on the 16 rows of a worker of ours, and another one's short requests
external flood  the same in front of a vLLM with 16 rows, which takes no row back

Over sockets a worker of ours is a process with the real scheduler and blocks whose forward pass is a sleep
(modelled_runner.py), and the vLLM a scripted one in a process of its own. A step takes 20 ms, and 25 us for
each prompt token of a worker of ours, on both sides.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.sim.modelled_runner import Linear, Modelled
from penstock import rng
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.bench.load import percentile
from penstock.clock import NS_PER_MS, NS_PER_S, SystemClock, sleep
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.policy.tenant import Tenant
from penstock.protocol.address import WorkerLaunch
from penstock.sim.scenarios.setup import Setup, play
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.traffic.workload import (
    Callers,
    Chat,
    Gamma,
    LengthDistribution,
    Poisson,
    Stampede,
    TrafficSource,
    merged,
)
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.types import TenantId

REPOSITORY = Path(__file__).parents[2]
from provider_process import ProviderProcess
from served import Server
from tenant_keys import add

ROWS, FIXED_MS, PREFILL_US = 16, 20.0, 25.0
MODELLED = Modelled(
    speed=Linear(fixed_ns=round(FIXED_MS * 1e6), prefill_ns=round(PREFILL_US * 1e3)),
    num_blocks=65_536, max_model_len=32_768, first_token=1000, num_tokens=64,
)  # fmt: skip
TTFT_MS, TPOT_MS = 2000, 150
SECONDS, ANSWER = 20.0, 40
CAPACITY = ROWS / (ANSWER * FIXED_MS / 1e3)
"""Requests per second that one worker can answer: its rows, over how long one is held."""
FLOOD, FLOOD_TOKENS, FLOOD_S = 32, 400, 2.0
FIRST_ID = 400
SHARE_OFF, LATE_MS, TIME_OFF = 0.1, 100.0, 0.25
"""The tolerance: shares of requests within so much; times within so many milliseconds, or within this part of
them."""


@dataclass
class Asked:
    """The result of one request."""

    tenant: str
    at_s: float
    is_ok: bool = False
    is_refused: bool = False
    ttft_ms: float = 0.0
    end_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Scenario:
    """The load, and the worker."""

    sources: tuple[TrafficSource, ...]
    bands: Mapping[str, str]
    """Of each tenant."""
    is_external: bool = False
    processes: int = 1
    """Of the gateway."""
    seconds: float = SECONDS


def overload(*, processes: int = 1) -> Scenario:
    tenants = (("a", 0.3), ("b", 0.3), ("c", 0.3), ("first", 0.1))
    source = Chat(
        arrivals=Poisson(2 * CAPACITY), callers=Callers(model="m", tenants=tenants),
        prompt=LengthDistribution(100, 0.4, maximum=400), output=LengthDistribution(ANSWER, 0.3, maximum=120),
    )  # fmt: skip
    bands = {"a": "default", "b": "default", "c": "default", "first": "priority"}
    return Scenario((source,), bands, processes=processes)


def flood(*, is_external: bool) -> Scenario:
    small = Chat(
        name="small", arrivals=Gamma(4.0, cv=0.1), callers=Callers(model="m", tenants=(("small", 1.0),)),
        prompt=LengthDistribution(40, 0.0), output=LengthDistribution(8, 0.0),
    )  # fmt: skip
    big = Chat(
        name="big", arrivals=Stampede(FLOOD, FLOOD_S), callers=Callers(model="m", tenants=(("big", 1.0),)),
        prompt=LengthDistribution(40, 0.0), output=LengthDistribution(FLOOD_TOKENS, 0.0),
    )  # fmt: skip
    return Scenario((small, big), {"small": "default", "big": "default"}, is_external=is_external)


LOADS = {
    "overload": overload(), "overload, two": overload(processes=2), "flood": flood(is_external=False),
    "external flood": flood(is_external=True),
}  # fmt: skip


def counted(scenario: Scenario, asked: Sequence[Asked]) -> dict[str, float]:
    """The figures that both sides give. Names that end with "share" or "ms" have a tolerance."""
    found: dict[str, float] = {"requests": len(asked)}
    for tenant in scenario.bands:
        own = [each for each in asked if each.tenant == tenant]
        reported = sorted(each.ttft_ms for each in own if each.is_ok)
        found[f"{tenant}: requests"] = len(own)
        found[f"{tenant}: answered, share"] = round(sum(each.is_ok for each in own) / len(own), 3)
        found[f"{tenant}: first token p50, ms"] = round(percentile(reported, 0.5)) if reported else -1
        found[f"{tenant}: first token p95, ms"] = round(percentile(reported, 0.95)) if reported else -1
    found["neither answered nor refused"] = sum(not (each.is_ok or each.is_refused) for each in asked)
    return found


def off(name: str, one: float, other: float) -> bool:
    """Whether two sides differ by more than the tolerance."""
    difference = abs(one - other)
    if name.endswith("share"):
        return difference > SHARE_OFF
    if name.endswith("ms"):
        return difference > max(LATE_MS, TIME_OFF * max(one, other))
    return difference > 0


# --- in the simulator ----------------------------------------------------------------------------------


def engine(scenario: Scenario) -> EngineSettings:
    """Of the worker; an external one takes requests as they come."""
    order = "fcfs" if scenario.is_external else "fair"
    return EngineSettings(max_running=ROWS, kv_memory_bytes=1, scheduling=order)


def simulated(scenario: Scenario, seed: int) -> list[Asked]:
    """The scenario on virtual time."""
    prefill_ns = 0 if scenario.is_external else round(PREFILL_US * 1e3)
    law = LinearStepTime(fixed_ns=round(FIXED_MS * 1e6), row_ns=0, prefill_ns=prefill_ns, kv_ps=0)
    worker = SimWorkerSpec(
        step_time=law, engine=engine(scenario), num_blocks=MODELLED.num_blocks,
        max_model_len=MODELLED.max_model_len, kind="", is_external=scenario.is_external,
    )  # fmt: skip
    admission = AdmissionConfig(ttft_target_ms=TTFT_MS, tpot_target_ms=TPOT_MS, targets=())
    server = msgspec.structs.replace(Config().server, processes=scenario.processes)
    config = msgspec.structs.replace(Config(), admission=admission, server=server)
    tenants = {name: Tenant(id=TenantId(name), band=band) for name, band in scenario.bands.items()}
    world = WorldSpec(
        config=config, pools=(PoolSpec(model="m", worker=worker, count=1),), tenants=tenants,
        gateways=scenario.processes,
    )  # fmt: skip
    played = play(Setup(world=world, sources=scenario.sources, seconds=scenario.seconds), seed)
    return [
        Asked(
            each.tenant, each.at_ns / NS_PER_S, each.outcome is Outcome.FINISHED,
            each.outcome in (Outcome.REJECTED, Outcome.EVICTED), each.ttft_ns / NS_PER_MS,
            each.end_ns / NS_PER_S, each.completion_tokens,
        )
        for each in played.records
    ]  # fmt: skip


# --- over sockets --------------------------------------------------------------------------------------


@contextmanager
def worker_of(scenario: Scenario, place: Path) -> Iterator[dict[str, object]]:
    """Starts it; what the configuration says of it."""
    if scenario.is_external:
        with ProviderProcess("vllm", rows=ROWS) as provider:
            provider.behaves(step_s=FIXED_MS / 1e3)
            yield {
                "url": provider.url, "engine": "vllm", "served_model": "served", "max_model_len": 4096,
                "max_running": ROWS,
            }  # fmt: skip
        return
    address = f"unix:{place}/worker.sock"
    launch = WorkerLaunch(
        model_path="modelled", model_name="m", address=address, hash_key=b"overload" * 4,
        engine=engine(scenario), runner="bench.sim.modelled_runner:build_runner",
    )  # fmt: skip
    with (place / "worker").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.worker"], stdin=subprocess.PIPE, stderr=log,
            env=MODELLED.environment(str(REPOSITORY)),
        )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        yield {"url": address, "engine": "penstock"}
    finally:
        process.terminate()
        process.wait(20)
        if process.stdin is not None:
            process.stdin.close()


class _First:
    """When the first token of a stream came, and whether it ended well."""

    def __init__(self) -> None:
        self.first_ns, self.tokens, self.is_done = 0, 0, False

    def on_bytes(self, data: bytes) -> None:
        """See `BodySink`."""
        if not self.first_ns and b"data: {" in data:
            self.first_ns = CLOCK.now_ns()
        self.tokens += data.count(b"data: {")
        self.is_done = self.is_done or b"[DONE]" in data


CLOCK = SystemClock()


def body(request: SimRequest) -> bytes:
    """The same prompt and answer as the simulator's, in tokens."""
    draw = rng.stream(request.id, "content")
    prompt = [FIRST_ID + draw.getrandbits(11) for each in request.prompt for _ in range(each.tokens)]
    return json.dumps(
        {
            "model": "m", "prompt": prompt, "max_tokens": request.output_tokens, "stream": True,
            "ignore_eos": True, "temperature": 0, "seed": 3,
        }
    ).encode()  # fmt: skip


async def load(
    url: str, keys: Mapping[str, str], requests: Sequence[tuple[SimRequest, bytes]]
) -> list[Asked]:
    limits = ClientLimits(request_timeout_s=120)
    clients = {name: Client(ApiAddress.parse(url), key=key, limits=limits) for name, key in keys.items()}
    for client in clients.values():  # The cost of the first request of a process belongs to none of them.
        await client.post(
            "/completions", json.dumps({"model": "m", "prompt": [400], "max_tokens": 1}).encode()
        )
    began_ns, found = CLOCK.now_ns() + NS_PER_S, list[Asked]()

    async def one(request: SimRequest, content: bytes) -> None:
        due_ns = began_ns + request.at_ns
        await sleep(max(0, due_ns - CLOCK.now_ns()) / NS_PER_S)
        sink, asked = _First(), Asked(request.tenant, request.at_ns / NS_PER_S)
        found.append(asked)
        answer = await clients[request.tenant].post("/completions", content, sink)
        asked.is_ok = answer.status == 200 and sink.is_done
        asked.is_refused = answer.status in (429, 503)
        asked.ttft_ms = (sink.first_ns - due_ns) / NS_PER_MS
        asked.end_s, asked.tokens = (CLOCK.now_ns() - began_ns) / NS_PER_S, sink.tokens

    async with asyncio.TaskGroup() as group:
        for request, content in requests:
            group.create_task(one(request, content))
    for client in clients.values():
        await client.close()
    return found


def served(scenario: Scenario, place: Path, seed: int) -> list[Asked]:
    """The scenario over sockets."""
    requests = [(each, body(each)) for each in merged(scenario.sources, seed, scenario.seconds)]
    with worker_of(scenario, place) as worker:
        file = place / "keys.jsonl"
        keys = {name: add(file, tenant=name).key for name in scenario.bands}
        config = {
            "server": {"port": 0, "processes": scenario.processes},
            "models": [{"path": "penstock-demo-mini", "name": "m", "replicas": 0, "workers": [worker]}],
            "auth": {"keys_file": str(file), "secret": "x" * 20},
            "tenants": [{"id": name, "band": band} for name, band in scenario.bands.items()],
            "admission": {"ttft_target_ms": TTFT_MS, "tpot_target_ms": TPOT_MS, "targets": []},
            "log": {"access": False},
        }  # fmt: skip
        written = place / "penstock.yaml"
        written.write_text(json.dumps(config))  # JSON is YAML.
        server = Server(place, "-c", str(written), PENSTOCK_STATE_DIR=str(place / "state"))
        try:
            server.wait_ready()
            return asyncio.run(load(server.url, keys, requests))
        finally:
            server.close()
