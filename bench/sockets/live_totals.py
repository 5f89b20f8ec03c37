"""The amounts that a gateway's limiter and budgets have settled, kept where kill -9 cannot take them: for
bench/sockets/ledger_crash.py.

    python -m bench.sockets.live_totals DIRECTORY serve -c FILE    as `penstock serve -c FILE`, with a file
                                                                   of totals for this life

A mapped file outlives the process that wrote to it. Two copies take turns, so that one of them is always
whole; each names the request whose settlement has begun. Settling and closing the ledger's record are two
steps: whoever dies between them leaves that name.
"""

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from penstock.cli import main as cli
from penstock.clock import SystemClock
from penstock.gateway import app
from penstock.gateway.dispatch import assemble
from penstock.policy.lifecycle.driver import Driver
from penstock.policy.request import Request

COPY_BYTES = 512
T = TypeVar("T")
TENANT = "bench"


class Life(msgspec.Struct, kw_only=True):
    """One life of a gateway process, as it stood when it was last heard of."""

    tokens: int = 0
    """That the limiter has settled."""
    micros: int = 0
    """That the budgets have settled."""
    restored_micros: int = 0
    """The budgets' figure of the tenant's month when they began: the ledger's word."""
    settling: str = ""
    """The request whose settlement had begun and not ended."""


class LifeFile:
    """Writes one life. The first byte says which copy counts."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(1 + 2 * COPY_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._turn = 0

    def write(self, life: Life) -> None:
        """Put it into the copy that does not count, then let that one count."""
        data = msgspec.json.encode(life).ljust(COPY_BYTES)
        assert len(data) == COPY_BYTES, "ids are short"
        self._turn = 1 - self._turn
        begin = 1 + self._turn * COPY_BYTES
        self._map[begin : begin + COPY_BYTES] = data
        self._map[0] = self._turn


def read_lives(directory: Path) -> list[Life]:
    """All lives so far, the oldest first."""
    lives: list[Life] = []
    for path in sorted(directory.glob("*.life")):
        data = path.read_bytes()
        text = data[1 + data[0] * COPY_BYTES :][:COPY_BYTES]
        lives.append(msgspec.json.decode(text, type=Life) if text.strip(b"\0 ") else Life())
    return lives


def watch(path: Path) -> None:
    """From now on this process writes what its gateway settles."""
    file, life = LifeFile(path), Life()
    make_policies, start = app.make_policies, assemble.GatewayPolicies.start
    found: list[assemble.GatewayPolicies] = []

    def watched_decisions(*args: object, **named: object) -> assemble.GatewayPolicies:
        found.append(cast(Callable[..., assemble.GatewayPolicies], make_policies)(*args, **named))
        return found[-1]

    async def watched_start(self: assemble.GatewayPolicies) -> None:
        await start(self)
        _, life.restored_micros = self.budgets.spent(SystemClock().now_ns(), TENANT)
        file.write(life)

    def watched(end: Callable[..., T]) -> Callable[..., T]:
        def watched_end(self: Driver, now_ns: int, request: Request, *args: object, **named: object) -> T:
            life.settling = request.id
            file.write(life)
            answer = end(self, now_ns, request, *args, **named)
            life.tokens = found[-1].limits.limiter.settled
            life.micros = found[-1].budgets.settled_micros
            life.settling = ""
            file.write(life)
            return answer

        return watched_end

    app.make_policies = watched_decisions
    Driver.ended = watched(Driver.ended)
    Driver.attempt_failed = watched(Driver.attempt_failed)
    assemble.GatewayPolicies.start = watched_start


def main() -> int:
    """Serve, watched."""
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    watch(directory / f"{len(list(directory.glob('*.life'))):04}-{os.getpid()}.life")
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
