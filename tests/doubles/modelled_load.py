"""Overload of a worker whose steps take as long as they are told: a process with the real scheduler and
blocks whose forward pass is a sleep (modelled_runner.py), behind a `penstock serve`.

Twice what it can answer, of three tenants and a fourth one in the band "priority". A step takes 20 ms, and
25 us for each prompt token.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from modelled_runner import RUNNER, Linear, Modelled, modelled_worker
from served import Server
from tenant_keys import add

from penstock import rng
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.clock import NS_PER_S, SystemClock, sleep
from penstock.config.engine_settings import EngineSettings
from penstock.policy.flow import Outcome
from penstock.protocol.address import WorkerLaunch
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import decode_completion_event
from penstock.protocol.stream import EventReader
from penstock.sim.traffic.prompts import RequestRecord, Segment, SimRequest
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
FIRST_TOKEN, ANSWER_TOKEN = 400, 1000
OUTCOMES = {200: Outcome.FINISHED, 429: Outcome.REJECTED, 503: Outcome.EVICTED}


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
    """As HTTP has it, in tokens. Every second segment from the third on is an earlier answer, of the one
    token that the modelled engine says.
    """
    prompt: list[int] = []
    for i, segment in enumerate(request.prompt):
        draw = rng.stream(segment.content, "content").getrandbits
        is_answer = i > 1 and i % 2 == 0
        prompt += [ANSWER_TOKEN if is_answer else FIRST_TOKEN + draw(11) for _ in range(segment.tokens)]
    fields = {
        "model": "m", "prompt": prompt, "max_tokens": request.output_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return msgspec.json.encode(fields)


class Answer:
    """One answer, stamped while it is read. A `BodySink`."""

    def __init__(self) -> None:
        self.first_ns, self.last_ns, self.usage, self.is_done = -1, -1, UsageBody(), False
        self._reader = EventReader()

    def on_bytes(self, data: bytes) -> None:
        """Read the events of a stream."""
        now_ns = CLOCK.now_ns()
        for event in self._reader.feed(data):
            if event == b"[DONE]":
                self.is_done = True
                continue
            chunk = decode_completion_event(event)
            self.usage = chunk.usage or self.usage
            if any(choice.text for choice in chunk.choices):
                self.first_ns, self.last_ns = now_ns if self.first_ns < 0 else self.first_ns, now_ns


async def load(url: str, keys: Mapping[str, str], requests: Sequence[SimRequest]) -> list[RequestRecord]:
    """Send the requests of tenants when they are due, and wait for the answers."""
    limits, address = ClientLimits(request_timeout_s=600), ApiAddress.parse(url)
    clients = {name: Client(address, key=key, limits=limits) for name, key in keys.items()}
    bodies = [(each, body(each)) for each in requests]
    began_ns, records = CLOCK.now_ns() + NS_PER_S // 10, list[RequestRecord]()

    async def one(request: SimRequest, content: bytes) -> None:
        answer, at_ns = Answer(), began_ns + request.at_ns
        response = await clients[request.tenant].post("/completions", content, answer)
        is_cut, usage = response.status == 200 and not answer.is_done, answer.usage
        records.append(
            RequestRecord(
                id=request.id, tenant=request.tenant, model=request.model, band="", at_ns=at_ns,
                outcome=Outcome.FAILED if is_cut else OUTCOMES[response.status], first_ns=answer.first_ns,
                end_ns=max(answer.last_ns, at_ns), prompt_tokens=usage.prompt_tokens or 0,
                cached_tokens=usage.cached_tokens or 0, completion_tokens=usage.completion_tokens or 0,
            )
        )  # fmt: skip

    async with asyncio.TaskGroup() as group:
        for request, content in bodies:
            await sleep(max(0, began_ns + request.at_ns - CLOCK.now_ns()) / NS_PER_S)
            group.create_task(one(request, content))
    for client in clients.values():
        await client.close()
    return records


def served(place: Path, *, processes: int, seconds: float, seed: int) -> list[RequestRecord]:
    """So many seconds of the load, behind a request of each tenant: a process's first costs more."""
    requests = list(merged((SOURCE,), seed, seconds))
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
            first = [
                SimRequest(id=name, at_ns=0, tenant=name, prompt=(Segment(0, 1),), output_tokens=1)
                for name in keys
            ]
            asyncio.run(load(server.url, keys, first))
            return asyncio.run(load(server.url, keys, requests))
        finally:
            server.close()
