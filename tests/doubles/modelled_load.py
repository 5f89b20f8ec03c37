"""Overload of a worker whose steps take as long as they are told: a process with the real scheduler and
blocks whose forward pass is a sleep (modelled_runner.py), behind a `penstock serve`.

Twice what it can answer, of three tenants and a fourth one in the band "priority". A step takes 20 ms, and
25 us for each prompt token.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modelled_runner import RUNNER, Linear, Modelled, modelled_worker
from served import Server
from tenant_keys import add

from penstock import rng
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.clock import NS_PER_S, SystemClock, sleep
from penstock.config.engine_settings import EngineSettings
from penstock.protocol.address import WorkerLaunch
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, merged

CLOCK = SystemClock()
ROWS, FIXED_MS, PREFILL_US = 16, 20.0, 25.0
MODELLED = Modelled(
    speed=Linear(fixed_ns=round(FIXED_MS * 1e6), prefill_ns=round(PREFILL_US * 1e3)),
    num_blocks=65_536, max_model_len=32_768, first_token=1000, num_tokens=64,
)  # fmt: skip
ANSWER = 40
CAPACITY = ROWS / (ANSWER * FIXED_MS / 1e3)
"""Requests per second that one worker can answer: its rows, over how long one is held."""
TENANTS = (("a", 0.3), ("b", 0.3), ("c", 0.3), ("first", 0.1))
BANDS = {"a": "default", "b": "default", "c": "default", "first": "priority"}
SOURCE = Chat(
    arrivals=Poisson(2 * CAPACITY), callers=Callers(model="m", tenants=TENANTS),
    prompt=LengthDistribution(100, 0.4, maximum=400), output=LengthDistribution(ANSWER, 0.3, maximum=120),
)  # fmt: skip
FIRST_ID = 400


@dataclass
class Outcome:
    """The result of one request."""

    tenant: str
    is_ok: bool = False
    is_refused: bool = False


@contextmanager
def worker_of(place: Path) -> Iterator[dict[str, object]]:
    """Start it; yields its entry of the configuration."""
    address = f"unix:{place}/worker.sock"
    launch = WorkerLaunch(
        model_path="modelled", model_name="m", address=address, hash_key=b"overload" * 4,
        engine=EngineSettings(max_running=ROWS, kv_memory_bytes=1, scheduling="fair"), runner=RUNNER,
    )  # fmt: skip
    with modelled_worker(place, launch, MODELLED.environment()):
        yield {"url": address, "engine": "penstock"}


def body(request: SimRequest) -> bytes:
    """The prompt and answer, in tokens."""
    draw = rng.stream(request.id, "content")
    prompt = [FIRST_ID + draw.getrandbits(11) for each in request.prompt for _ in range(each.tokens)]
    return json.dumps(
        {
            "model": "m", "prompt": prompt, "max_tokens": request.output_tokens, "stream": True,
            "ignore_eos": True, "temperature": 0, "seed": 3,
        }
    ).encode()  # fmt: skip


class _Body:
    """Notes whether a stream ended well."""

    is_done = False

    def on_bytes(self, data: bytes) -> None:
        """See `BodySink`."""
        self.is_done = self.is_done or b"[DONE]" in data


async def load(
    url: str, keys: Mapping[str, str], requests: Sequence[tuple[SimRequest, bytes]]
) -> list[Outcome]:
    limits = ClientLimits(request_timeout_s=120)
    clients = {name: Client(ApiAddress.parse(url), key=key, limits=limits) for name, key in keys.items()}
    for client in clients.values():  # The cost of the first request of a process belongs to none of them.
        await client.post(
            "/completions", json.dumps({"model": "m", "prompt": [400], "max_tokens": 1}).encode()
        )
    began_ns, found = CLOCK.now_ns() + NS_PER_S, list[Outcome]()

    async def one(request: SimRequest, content: bytes) -> None:
        await sleep(max(0, began_ns + request.at_ns - CLOCK.now_ns()) / NS_PER_S)
        sink, outcome = _Body(), Outcome(request.tenant)
        found.append(outcome)
        answer = await clients[request.tenant].post("/completions", content, sink)
        outcome.is_ok = answer.status == 200 and sink.is_done
        outcome.is_refused = answer.status in (429, 503)

    async with asyncio.TaskGroup() as group:
        for request, content in requests:
            group.create_task(one(request, content))
    for client in clients.values():
        await client.close()
    return found


def served(place: Path, *, processes: int, seconds: float, seed: int) -> list[Outcome]:
    """So many seconds of the load."""
    requests = [(each, body(each)) for each in merged((SOURCE,), seed, seconds)]
    with worker_of(place) as worker:
        file = place / "keys.jsonl"
        keys = {name: add(file, tenant=name).key for name in BANDS}
        config = {
            "server": {"port": 0, "processes": processes},
            "models": [{"path": "penstock-demo-mini", "name": "m", "replicas": 0, "workers": [worker]}],
            "auth": {"keys_file": str(file), "secret": "x" * 20},
            "tenants": [{"id": name, "band": band} for name, band in BANDS.items()],
            "admission": {"ttft_target_ms": 2000, "tpot_target_ms": 150, "targets": []},
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
