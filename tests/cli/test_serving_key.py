"""Whose key the file of an address holds, while one server takes over from another: cli/wiring/serving.py."""

import asyncio
import contextlib
import io
import socket
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.cli.wiring.handover import Handover, Takeover
from penstock.cli.wiring.serving import Serving
from penstock.cli.wiring.signals import StopSignals
from penstock.cli.wiring.state import load_key, save_key
from penstock.clock import SystemClock
from penstock.config.tree import AuthConfig, Config, LogConfig, ServerConfig
from penstock.errors import OperatorError
from penstock.fleet.launchers.process import Spares
from penstock.telemetry.log import Log

HOST = "127.0.0.1"


class StandInStack:
    """Loads at once, or fails to, and says when its server is ready."""

    num_streams = 0
    kernels: tuple[str, ...] = ()

    def __init__(self, listener: socket.socket, *, fails: bool = False) -> None:
        self.listeners: Sequence[socket.socket] = (listener,)
        self.serves = asyncio.Event()
        self._fails = fails
        self._taken: Takeover | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The banner asks for them, so the server is ready."""
        self.serves.set()
        return ("m",)

    async def start(self, takeover: Takeover | None) -> tuple[str, int]:
        self._taken = takeover
        if takeover is not None:
            self.listeners = takeover.listeners
        return self.listeners[0].getsockname()

    async def wait_ready(self, _: object) -> None:
        if self._fails:
            raise OperatorError("the model cannot be served")

    async def take_over(self, takeover: Takeover) -> None:
        await takeover.finish()

    async def drain(self, **_: object) -> None: ...

    async def abort(self) -> None:
        if self._taken is not None:
            self._taken.close()


Serve = Callable[..., Serving]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def make(stack: StandInStack, *, auth: AuthConfig | None = None, takes_over: bool = False) -> Serving:
        monkeypatch.setattr("penstock.cli.wiring.serving.Stack", lambda *_: stack)
        server = ServerConfig(host=HOST, port=stack.listeners[0].getsockname()[1])
        config = Config(server=server, auth=auth or AuthConfig())
        return Serving(config, SystemClock(), 0, lambda: config, Spares(), takes_over=takes_over)

    return make


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as made:
        yield made


async def key_of(server: Serving, stack: StandInStack) -> str:
    """The key in the file while the server serves; then it stops."""
    address = stack.listeners[0].getsockname()
    running = asyncio.create_task(server.run(StopSignals()))
    serves = asyncio.create_task(stack.serves.wait())
    await asyncio.wait([running, serves], return_when=asyncio.FIRST_COMPLETED)
    serves.cancel()
    key = load_key(*address)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return key


def taking_over(listener: socket.socket, server: Serving, stack: StandInStack) -> str:
    """The key in the file once the server has taken over from one that waits for it."""

    async def main() -> str:
        log = Log(LogConfig(), SystemClock(), stream=io.StringIO())
        running = Handover([listener], lambda: None, log)
        running.open()
        try:
            return await key_of(server, stack)
        finally:
            running.close()

    return asyncio.run(main())


def test_a_plain_server_keeps_its_key_while_it_serves(listener: socket.socket, serving: Serve) -> None:
    stack = StandInStack(listener)
    assert asyncio.run(key_of(serving(stack), stack)).startswith("sk-")
    assert load_key(*listener.getsockname()) == ""


def test_a_takeover_that_fails_leaves_the_running_servers_key(
    listener: socket.socket, serving: Serve
) -> None:
    save_key(*listener.getsockname(), "sk-running")
    stack = StandInStack(listener, fails=True)
    with pytest.raises(OperatorError):
        taking_over(listener, serving(stack, takes_over=True), stack)
    assert load_key(*listener.getsockname()) == "sk-running"


def test_a_takeover_goes_on_with_the_running_servers_key(listener: socket.socket, serving: Serve) -> None:
    save_key(*listener.getsockname(), "sk-running")
    stack = StandInStack(listener)
    assert taking_over(listener, serving(stack, takes_over=True), stack) == "sk-running"


def test_a_new_key_is_kept_after_a_takeover_from_a_server_with_configured_keys(
    listener: socket.socket, serving: Serve
) -> None:
    stack = StandInStack(listener)
    assert taking_over(listener, serving(stack, takes_over=True), stack).startswith("sk-")


def test_the_running_servers_key_is_forgotten_once_configured_keys_hold(
    listener: socket.socket, serving: Serve
) -> None:
    save_key(*listener.getsockname(), "sk-running")
    stack = StandInStack(listener)
    configured = AuthConfig(keys=("sk-configured-0123456789",))
    assert taking_over(listener, serving(stack, auth=configured, takes_over=True), stack) == ""


def test_a_server_that_was_taken_over_leaves_the_next_ones_key(
    listener: socket.socket, serving: Serve
) -> None:
    async def main() -> None:
        old, following = StandInStack(listener), StandInStack(listener)
        running = asyncio.create_task(serving(old).run(StopSignals()))
        await old.serves.wait()
        key = load_key(*listener.getsockname())
        next_server = asyncio.create_task(serving(following, takes_over=True).run(StopSignals()))
        assert await running == 0
        await following.serves.wait()
        assert load_key(*listener.getsockname()) == key != ""
        next_server.cancel()
        await asyncio.wait([next_server])

    asyncio.run(main())
