"""Workers by name: a name's addresses, or its SRV records, asked for again and again.

A failed lookup changes nothing: a name server that is away must not take a healthy fleet along. That there is
no such name (or no address of it) is believed only when it was said `EMPTY_ANSWERS` times in a row, since
resolvers say so by mistake too.
"""

import asyncio
import importlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.clock import sleep
from penstock.errors import ConfigError
from penstock.fleet.sources.found import TIMEOUT_S, DiscoveredAddress, DiscoveredWorkers
from penstock.telemetry.log import Log

EMPTY_ANSWERS = 3
REFRESH_S = 5.0
"""DNS is asked this often."""
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class LookupFailed(Exception):
    """No answer; nothing is known."""


Lookup = Callable[[str], Awaitable[tuple[DiscoveredAddress, ...]]]
"""Asks for a name. An empty answer says that there is nobody.

Raises:
    LookupFailed: there is no answer.
"""


class DnsSource:
    """Asks every `REFRESH_S`, one question at a time. `run` it until it is cancelled."""

    def __init__(self, found: DiscoveredWorkers, lookup: Lookup, log: Log) -> None:
        self._found, self._lookup, self._log = found, lookup, log
        self._config = found.config
        self._empty = 0
        self._trouble = ""

    async def run(self) -> None:
        """Look, now and then."""
        while True:
            await self.look()
            await sleep(REFRESH_S)

    async def look(self) -> None:
        """Look once."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                endpoints = await self._lookup(self._config.dns)
        except (LookupFailed, TimeoutError) as error:
            self._say(str(error) or f"no answer within {TIMEOUT_S:g} s")
            return
        self._empty = 0 if endpoints else self._empty + 1
        if endpoints or self._empty >= EMPTY_ANSWERS:
            self._say("")
            await self._found.take(endpoints)
        else:
            self._say("there is no such name, or no address of it")

    def _say(self, trouble: str) -> None:
        """In the log, when it has changed."""
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                self._log.warning("workers cannot be looked up", name=self._config.dns, why=trouble)


def lookup_for(dns: str) -> Lookup:
    """How this name is asked for.

    Raises:
        ConfigError: it has SRV records, and dnspython is not installed.
    """
    if not dns.startswith("_"):
        return addresses
    try:
        resolver = importlib.import_module("dns.asyncresolver")
    except ImportError:
        raise ConfigError(
            "models[].discover.dns: SRV records need dnspython; install penstock[dns]"
        ) from None
    return SrvLookup(resolver)


async def addresses(dns: str) -> tuple[DiscoveredAddress, ...]:
    """A `Lookup`: every address of "name:port", as this machine resolves names."""
    host, _, port = dns.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_NAME:
            return ()
        raise LookupFailed(error.strerror or str(error)) from error
    except OSError as error:
        raise LookupFailed(str(error)) from error
    return tuple(DiscoveredAddress(str(where[0]), int(where[1])) for *_, where in found)


class SrvLookup:
    """A `Lookup`: what a name's SRV records of the best priority say (RFC 2782).

    Weights are of no use to us.
    """

    def __init__(self, resolver: Any) -> None:  # noqa: ANN401 - an extra's module.
        """`resolver` is dnspython's `asyncresolver`, or a resolver of one's own."""
        self._resolver = resolver
        answers = importlib.import_module("dns.resolver")
        self._nobody: tuple[type[Exception], ...] = (answers.NXDOMAIN, answers.NoAnswer)
        self._failed: type[Exception] = importlib.import_module("dns.exception").DNSException

    async def __call__(self, dns: str) -> tuple[DiscoveredAddress, ...]:
        """Ask."""
        try:
            records = list(await self._resolver.resolve(dns, "SRV"))
        except self._nobody:
            return ()
        except (self._failed, OSError) as error:
            raise LookupFailed(str(error)) from error
        best = min((record.priority for record in records), default=0)
        return tuple(
            DiscoveredAddress(record.target.to_text(omit_final_dot=True), record.port)
            for record in records
            if record.priority == best and record.target.to_text() != "."  # "." says: no such service here.
        )
