"""Handing listening sockets over, the two sides in one process: cli/wiring/handover.py."""

import asyncio
import io
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.cli.wiring import handover
from penstock.cli.wiring.handover import Handover, Takeover, begin_takeover
from penstock.clock import SystemClock
from penstock.config.tree import LogConfig, ServerConfig
from penstock.errors import ConfigError, OperatorError
from penstock.telemetry.log import Log


class Running:
    """A server's side, with its listening socket."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.listener = socket.create_server((host, port))
        self.config = ServerConfig(host=host, port=self.listener.getsockname()[1])
        self.taken = asyncio.Event()
        self.log = io.StringIO()
        log = Log(LogConfig(), SystemClock(), stream=self.log)
        self.handover = Handover([self.listener], self.taken.set, log)
        self.handover.open()

    def close(self) -> None:
        self.handover.close()
        self.listener.close()


@pytest.fixture
def path() -> Callable[[ServerConfig], Path]:
    def of(config: ServerConfig) -> Path:
        directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "penstock"
        return directory / f"serve-{config.host}-{config.port}.sock"

    return of


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "ERROR_PAUSE_S", 0.01)
    monkeypatch.setattr(handover, "ANSWER_TIMEOUT_S", 20.0)


def run(check: Callable[[Running], Awaitable[None]]) -> None:
    async def main() -> None:
        running = Running()
        try:
            await check(running)
        finally:
            running.close()

    asyncio.run(main())


async def begun(config: ServerConfig) -> Takeover:
    takeover = await begin_takeover(config)
    assert takeover is not None
    return takeover


def test_the_next_server_gets_the_sockets_and_an_answer(path: Callable[[ServerConfig], Path]) -> None:
    async def check(running: Running) -> None:
        takeover = await begun(running.config)
        assert takeover.listeners[0].getsockname() == running.listener.getsockname()
        assert not running.taken.is_set()
        await takeover.finish()
        await asyncio.wait_for(running.taken.wait(), 5)
        assert not path(running.config).exists()
        takeover.close()

    run(check)


def test_a_next_server_that_dies_before_the_answer_leaves_the_running_one_as_it_was(
    path: Callable[[ServerConfig], Path],
) -> None:
    async def check(running: Running) -> None:
        takeover = await begun(running.config)
        takeover._running.setblocking(False)
        takeover._running.send(handover.READY)
        takeover.close()  # It is gone before the running server has read that.
        while "stays" not in running.log.getvalue():
            await asyncio.sleep(0.01)
        assert not running.taken.is_set()
        assert path(running.config).exists()
        second = await begun(running.config)
        await second.finish()
        await asyncio.wait_for(running.taken.wait(), 5)
        second.close()

    run(check)


def test_two_takeovers_at_a_time_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(running: Running) -> None:
        first = await begun(running.config)
        monkeypatch.setattr(handover, "ANSWER_TIMEOUT_S", 0.1)
        with pytest.raises(OperatorError, match="another server may be taking over"):
            await begin_takeover(running.config)
        first.close()

    run(check)


def test_a_next_server_that_loads_for_ever_does_not_keep_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(running: Running) -> None:
        monkeypatch.setattr(handover, "LOADING_TIMEOUT_S", 0.05)
        slow = await begun(running.config)
        while "could not take over" not in running.log.getvalue():
            await asyncio.sleep(0.01)
        with pytest.raises(OperatorError, match="does not answer"):
            await slow.finish()
        assert not running.taken.is_set()
        monkeypatch.setattr(handover, "LOADING_TIMEOUT_S", 60.0)
        quick = await begun(running.config)
        await quick.finish()
        quick.close()
        slow.close()

    run(check)


def test_two_servers_of_one_port_have_a_door_each(path: Callable[[ServerConfig], Path]) -> None:
    async def check(running: Running) -> None:
        other = Running("127.0.0.2", running.config.port)
        try:
            first, second = await begun(running.config), await begun(other.config)
            for takeover, host in ((first, "127.0.0.1"), (second, "127.0.0.2")):
                assert takeover.listeners[0].getsockname()[0] == host
                takeover.close()
        finally:
            other.close()
        assert path(running.config).exists()

    run(check)


def test_a_server_that_goes_leaves_the_next_ones_door(path: Callable[[ServerConfig], Path]) -> None:
    async def check(running: Running) -> None:
        door = path(running.config)
        door.rename(door.with_suffix(".old"))  # Its inode stays taken.
        with socket.socket(socket.AF_UNIX) as next_door:
            next_door.bind(str(door))
            running.handover.close()
            assert door.exists()

    run(check)


def test_none_runs() -> None:
    async def main() -> None:
        running = Running()
        running.handover.close()
        assert await begin_takeover(running.config) is None
        running.listener.close()
        with pytest.raises(ConfigError, match=r"^server\.host: no\.such"):
            await begin_takeover(ServerConfig(host="no.such.host.invalid", port=1))

    asyncio.run(main())
