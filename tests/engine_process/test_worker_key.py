"""A worker with a key: who cannot show it hears and says nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Recorder, Requests
from raw_worker import RawWorker, raw_worker, submit

from penstock.backends.base import Phase
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerKey
from penstock.clock import SystemClock
from penstock.protocol.address import gateway_mac, worker_mac
from penstock.protocol.worker import Challenge, Proof, Ready, Welcome
from penstock.rng import fresh_key
from penstock.types import FinishReason

KEY = b"a key of both sides"


def test_on_the_wire() -> None:
    with raw_worker(tcp=True, key=KEY) as worker:
        client = worker.connect()
        challenge = client.receive()
        assert isinstance(challenge, Challenge)
        client.send(Proof(b"n" * 32, gateway_mac(KEY, challenge.nonce, b"n" * 32)))
        assert client.receive() == Welcome(worker_mac(KEY, challenge.nonce, b"n" * 32))
        client.until_kind(Ready)
        client.send(submit("a", max_tokens=3))
        assert client.last("a").finish is not None

        replayed = worker.connect()
        again = replayed.receive()
        assert isinstance(again, Challenge)
        assert again.nonce != challenge.nonce
        replayed.send(Proof(b"n" * 32, gateway_mac(KEY, challenge.nonce, b"n" * 32)))
        assert replayed.receive() is None, "what was overheard is of no use"
        for rude in (
            lambda at: at.send(submit("b")),
            lambda at: at.send(Proof(b"", b"")),
            lambda at: at.send_bytes(b"\xff\xff\0\0" + bytes(2000)),
        ):
            stranger = worker.connect()
            assert isinstance(stranger.receive(), Challenge)
            rude(stranger)
            assert stranger.receive() is None
        client.send(submit("c", max_tokens=3))
        assert client.last("c").finish is not None, "nobody else's request was touched"


def prove(client) -> None:
    challenge = client.receive()
    assert isinstance(challenge, Challenge)
    client.send(Proof(b"n" * 32, gateway_mac(KEY, challenge.nonce, b"n" * 32)))
    assert client.receive() == Welcome(worker_mac(KEY, challenge.nonce, b"n" * 32))
    client.until_kind(Ready)


def test_silent_strangers_lock_no_gateway_out() -> None:
    """A crowd connects, says nothing and comes again as often as it is cut; a gateway is let in all the
    same.
    """
    with raw_worker(tcp=True, key=KEY) as worker:
        strangers = [worker.connect() for _ in range(200)]
        gateway = worker.connect()
        prove(gateway)
        strangers += [worker.connect() for _ in range(200)]
        gateway.send(submit("a", max_tokens=3))
        assert gateway.last("a").finish is not None
        assert isinstance(strangers[0].receive(), Challenge)
        assert strangers[0].receive() is None, "the oldest one was cut"
        assert isinstance(strangers[-1].receive(), Challenge), "the newest one may be a gateway"


def test_a_crowd_at_one_address_costs_other_addresses_nothing() -> None:
    with raw_worker(tcp=True, key=KEY) as worker:
        early = worker.connect(source="127.0.0.2")
        assert isinstance(early.receive(), Challenge)
        crowd = [worker.connect(source="127.0.0.3") for _ in range(100)]
        assert isinstance(crowd[-1].receive(), Challenge)
        early.send(Proof(b"", b""))
        assert early.receive() is None
        late = worker.connect(source="127.0.0.4")
        prove(late)


def run(worker: RawWorker, key: bytes | None, check: Callable[[EngineBackend], Awaitable[None]]) -> None:
    async def with_backend() -> None:
        worker.connect().close()  # It listens.
        credentials = WorkerKey(key, lambda: fresh_key(32)) if key is not None else None
        backend = EngineBackend(byte_tokenizer(), SystemClock(), key=credentials)
        backend.connect_to(worker.address)
        try:
            async with asyncio.timeout(30):
                await check(backend)
        finally:
            await backend.close()

    asyncio.run(with_backend())


def test_who_has_the_key_is_served() -> None:
    async def check(backend: EngineBackend) -> None:
        while not backend.status.ready:
            await asyncio.sleep(0.005)
        recorder = Recorder()
        backend.generate(Requests().make(max_tokens=3), recorder)
        assert (await recorder.end()).reason is FinishReason.LENGTH

    with raw_worker(key=KEY) as worker:
        run(worker, KEY, check)


@pytest.mark.parametrize(
    ("worker_key", "key", "why"),
    [
        (KEY, None, "it wants a key: set api_key_env of the worker"),
        (b"", KEY, "it has no key, and this gateway has one for it: was it started with one?"),
    ],
)
def test_who_does_not_go_together_says_why(worker_key: bytes, key: bytes | None, why: str) -> None:
    async def check(backend: EngineBackend) -> None:
        while backend.status.phase is not Phase.REFUSED:
            await asyncio.sleep(0.005)
        assert backend.status.stage == why

    with raw_worker(key=worker_key) as worker:
        run(worker, key, check)


def test_another_key_is_never_let_in() -> None:
    async def check(backend: EngineBackend) -> None:
        for _ in range(60):
            await asyncio.sleep(0.005)
            assert not backend.status.ready
        assert backend.status.stage == "it did not take the key that api_key_env names"

    with raw_worker(key=KEY) as worker:
        run(worker, b"another key than that", check)
