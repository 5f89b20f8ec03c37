"""The process of one ensemble's steps, as the gateway sees it: one call at a time, tenants in turn, each call
with a bound on its time. A process that had to be ended is started again by the next call.
"""

import asyncio
import os
import sys
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any

import msgspec

from penstock.config.routing import EnsembleConfig
from penstock.errors import ConfigError, EnsembleFailed, InvalidRequest, Overloaded
from penstock.gateway.ensembles.process import BROKEN, FAILED, FRAME_BYTES_MAX, LENGTH, NO_MEMORY, OK, REFUSED

START_S_MAX = 120.0
"""For importing the steps, which may bring large packages."""
WAITING_MAX = 256
"""Calls that wait for the process."""
WAITING_MAX_BY_TENANT = 64


class _Ended(Exception):
    """The process ended, or had to be."""


class Turns:
    """One caller at a time, and tenants in turn: a tenant with many calls delays another one by one call."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False

    async def take(self, tenant: str) -> None:
        """Wait for one's turn, which `give_back` ends.

        Raises:
            Overloaded: too many wait already.
        """
        if not self._is_taken:
            self._is_taken = True
            return
        mine = self._waiting.setdefault(tenant, deque())
        if len(mine) >= WAITING_MAX_BY_TENANT or sum(map(len, self._waiting.values())) >= WAITING_MAX:
            raise Overloaded("Too many requests wait for this ensemble's steps.", retry_after_s=1.0)
        turn = asyncio.get_running_loop().create_future()
        mine.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Let the next one in."""
        assert self._is_taken, "it was somebody's turn"
        while self._waiting:
            tenant, calls = next(iter(self._waiting.items()))
            turn = calls.popleft() if calls else None
            del self._waiting[tenant]
            if calls:
                self._waiting[tenant] = calls  # To the end of the row.
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


class Steps:
    """The steps of one ensemble."""

    def __init__(self, ensemble: EnsembleConfig) -> None:
        self._ensemble = ensemble
        self._process: asyncio.subprocess.Process | None = None
        self._turns = Turns()

    async def start(self) -> None:
        """Import the steps.

        Raises:
            ConfigError: that cannot be done.
        """
        try:
            await self._running()
        except _Ended as error:
            raise ConfigError(f"ensembles: {self._ensemble.name}: {error}") from error

    async def call(self, entry: str, tenant: str, *arguments: object) -> Any:  # noqa: ANN401 - JSON.
        """The entry point's result for the arguments.

        Raises:
            InvalidRequest: it refuses them (ValueError).
            EnsembleFailed: it fails on them, or takes too much for them.
            Overloaded: too many wait for it.
        """
        await self._turns.take(tenant)
        try:
            kind, data = await self._asked(entry, arguments)
        except _Ended as error:
            raise self._failed(entry, str(error)) from error
        finally:
            self._turns.give_back()
        if kind == OK:
            return msgspec.json.decode(data)
        text = data.decode()
        if kind == REFUSED:
            raise InvalidRequest(text or f"{entry} refuses this.", code="refused_by_ensemble")
        assert kind in (FAILED, NO_MEMORY)
        if kind == FAILED:
            raise self._failed(entry, f"raised {text}")
        raise self._failed(entry, f"took more than {self._ensemble.memory_bytes} bytes of memory")

    async def close(self) -> None:
        """End the process, whatever it does."""
        await self._stop()

    def _failed(self, entry: str, why: str) -> EnsembleFailed:
        return EnsembleFailed(f"The ensemble '{self._ensemble.name}' failed: {entry} {why}.")

    async def _asked(self, entry: str, arguments: tuple[object, ...]) -> tuple[bytes, bytes]:
        process = await self._running()
        timeout_s, is_over = self._ensemble.timeout_s, False
        try:
            async with asyncio.timeout(timeout_s):
                kind, data = await _exchanged(process, {"entry": entry, "arguments": arguments})
            is_over = kind != NO_MEMORY  # After that, what it holds is not worth keeping.
        except TimeoutError:
            raise _Ended(f"took more than {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise _Ended(f"was ended (exit code {await self._stop()})") from None
        finally:
            if not is_over:
                await self._stop()
        return kind, data

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        ensemble = self._ensemble
        hidden = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.gateway.ensembles.process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
            env=hidden | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        path = os.path.abspath(ensemble.path) if ensemble.path else ""
        entries = [entry for entry in (ensemble.before, ensemble.after) if entry]
        frame = {
            "path": path, "entries": entries, "timeout_s": ensemble.timeout_s,
            "memory_bytes": ensemble.memory_bytes,
        }  # fmt: skip
        try:
            async with asyncio.timeout(START_S_MAX):
                kind, data = await _exchanged(process, frame)
        except TimeoutError:
            await self._stop()
            raise _Ended(f"importing {' and '.join(entries)} took more than {START_S_MAX:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._stop()
            raise _Ended(f"importing {' and '.join(entries)} ended the process (exit code {code})") from None
        except BaseException:
            await self._stop()
            raise
        if kind == BROKEN:
            await self._stop()
            raise _Ended(f"{' and '.join(entries)} cannot be imported: {data.decode()}")
        return process

    async def _stop(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def _exchanged(process: asyncio.subprocess.Process, frame: dict[str, Any]) -> tuple[bytes, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    data = msgspec.json.encode(frame)
    process.stdin.write(LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    head = await process.stdout.readexactly(1 + LENGTH.size)
    (length,) = LENGTH.unpack(head[1:])
    if length > FRAME_BYTES_MAX:
        raise _Ended(f"returned more than {FRAME_BYTES_MAX} bytes")
    return head[:1], await process.stdout.readexactly(length)
