"""A client that does not read, in front of a worker that is reached over HTTP: the worker waits for it."""

import re
import socket
import types

import msgspec
import pytest
from engine_stand_ins import OpenAIStandIn, until
from test_external_conformance import tools

from penstock.backends.http.backend import ExternalWorker
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import HttpBackendLimits, HttpLimits

CHAT = "/v1/chat/completions"
NUM_EVENTS = 3000
"""With the padding 60 MB: far more than the sockets between worker and gateway hold."""
WORD = "w" * 40
"""What each says, 120 KB in all: more than the gateway holds for a client, also where it joins what came
together to one chunk."""
TOKENS_PER_EVENT = 10
BOUND = 66_000
SILENT_MAX_S = 1.0
"""The gateway and its worker share a process here: a pause of it is a silence, too."""
SMALL = 4096


class FatStandIn(OpenAIStandIn):
    """Its events are large, and more so than what they say."""

    num_sent = 0

    async def events(self, body):
        num_events = (body.get("max_completion_tokens") or body["max_tokens"]) // TOKENS_PER_EVENT
        async for event in super().events(
            body | {"max_tokens": num_events, "max_completion_tokens": num_events}
        ):
            self.num_sent += 1
            if isinstance(event, bytes):
                yield event
                continue
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    choice["delta"]["content"] = WORD
            yield event | {"padding": "x" * 20_000}


@pytest.fixture
def provided(kit, request):
    """A gateway and its provider, which the gateway gives up after a short silence."""
    stand_ins = []

    class Provided(kit.RunningGateway):
        async def make_backends(self):
            provider = FatStandIn()
            stand_ins.append(provider)
            await provider.start()
            worker = ExternalWorker(engine="openai", url=provider.url, model="served", max_model_len=32768)
            http = HttpLimits(idle_timeout_s=SILENT_MAX_S)
            config = HttpBackendLimits(probe_s=0.05, http=http)
            backend = make_backend(worker, self.tokenizer, tools(config))
            backend.open()
            await until(lambda: backend.status.ready)
            return {"tiny": backend}

        async def close_backends(self) -> None:
            await self.backend.close()
            await stand_ins[0].kill()

    given = {"buffer_bytes_max": BOUND, "slow_client": "pause", **getattr(request, "param", {})}
    running = Provided(kit.make_config(slow_client=given.pop("slow_client")), **given)
    yield types.SimpleNamespace(running=running, provider=stand_ins[0])
    running.stop()


@pytest.fixture
def deaf(provided, kit):
    """A client that asks for a long stream and reads nothing, over sockets that hold little."""
    running = provided.running
    raw = kit.Raw(running)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    running.wait_until(lambda: running.gateway._server.num_connections == 1)
    (connection,) = running.gateway._server._context.connections
    ours = connection._transport.get_extra_info("socket")
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    raw.send(
        kit.post(CHAT, kit.chat(stream=True, max_tokens=NUM_EVENTS * TOKENS_PER_EVENT), "Connection: close")
    )
    yield raw
    raw.close()


class Stalled:
    """Whether the worker has sent nothing for more than twice the time that it may be silent."""

    def __init__(self, provided):
        self._provider, self._clock = provided.provider, provided.running.clock
        self._sent = self._since_ns = 0

    def __call__(self):
        if self._provider.num_sent != self._sent:
            self._sent, self._since_ns = self._provider.num_sent, self._clock.now_ns()
        return self._sent > 0 and self._clock.now_ns() - self._since_ns > 2 * SILENT_MAX_S * 10**9


def content(answer):
    events = [msgspec.json.decode(line) for line in re.findall(rb"data: (\{.*\})\n", answer)]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())
    )


def test_a_worker_waits_for_a_slow_client_and_is_not_blamed(provided, kit, deaf) -> None:
    running, provider = provided.running, provided.provider
    running.wait_until(Stalled(provided))
    assert 100 < provider.num_sent < NUM_EVENTS
    assert provider.num_running == 1
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    answer = deaf.read_all()
    assert content(answer) == WORD * NUM_EVENTS
    assert b"data: [DONE]" in answer
    assert provider.num_sent > NUM_EVENTS
    assert b"penstock_slow_client_aborts_total 0.0" in running.metrics.render()
    # Its connection is read again: the next request goes over it.
    num_connections = provider.num_connections
    with kit.openai_client(running) as client:
        short = client.chat.completions.create(**kit.chat(max_tokens=5 * TOKENS_PER_EVENT))
    assert short.choices[0].message.content == WORD * 5
    assert provider.num_connections == num_connections


@pytest.mark.parametrize("provided", [{"write_timeout_s": 0.3}], indirect=True)
def test_a_dead_client_is_cut_off_and_its_worker_let_go(provided, deaf) -> None:
    running, provider = provided.running, provided.provider
    running.wait_until(lambda: provider.num_aborted == 1)
    assert provider.num_sent < NUM_EVENTS
    running.wait_until(lambda: running.gateway._server.num_connections == 0)
    assert b"penstock_slow_client_aborts_total 1.0" in running.metrics.render()


@pytest.mark.parametrize("provided", [{"slow_client": "abort"}], indirect=True)
def test_nobody_waits_where_slow_clients_are_aborted(provided, deaf) -> None:
    provided.running.wait_until(lambda: provided.provider.num_aborted == 1)
    assert provided.provider.num_sent < NUM_EVENTS
