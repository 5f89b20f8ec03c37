"""Peer cells as workers: one for each peer and model, under the peer's name, over the wire of our workers
(protocol/cells.py).

To the rest of the gateway a peer is a worker: its streams, its breaker, its drain. It has two facts more,
which placement goes by (policy/queueing/cells.py): how long a message takes there and back, measured, and how
long a request would wait there. A cell that is lost is no worker that a request has crashed.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerKey, WorkerLink
from penstock.clock import Clock, sleep
from penstock.config.cells import CellConfig, CellsConfig
from penstock.errors import ConfigError
from penstock.fleet.registry import Registry, Worker
from penstock.protocol.address import KEY_BYTES_MIN, NONCE_BYTES, parse_address
from penstock.protocol.cells import CellPing, CellReport, OpenCell
from penstock.protocol.worker import FromWorker
from penstock.rng import fresh_key
from penstock.text.tokenizer import Tokenizer, tokenizer_mark
from penstock.types import WorkerId

PING_S = 0.5
_SMOOTH = 4
"""The round trip follows the last so many pings; of a shorter one it follows at once, for only waiting adds
to it."""


class CellBackend(EngineBackend):
    """See the module."""

    def __init__(self, tokenizer: Tokenizer, clock: Clock, *, key: WorkerKey, model: str, here: str) -> None:
        """`here` is what this cell is called, `model` what both call the model."""
        super().__init__(tokenizer, clock, key=key)
        self._model, self._here = model, here
        self._pinging: asyncio.Task[None] | None = None
        self.rtt_ns = 0
        """There and back; 0: not measured yet."""
        self.cell_report = CellReport(sent_ns=0)
        """Its last report."""

    @property
    def takes_adapters(self) -> bool:
        """It loads its adapters itself."""
        return False

    def on_message(self, message: FromWorker, *, behind: bool = False) -> None:
        """See `LinkOwner`."""
        if isinstance(message, CellReport):
            self._measured(message)
        else:
            super().on_message(message, behind=behind)

    def on_link_lost(self, why: str) -> None:
        """See `LinkOwner`."""
        if self._link is not None:
            self._link.was_cut = True  # Its streams did not kill it: nobody is suspected of that.
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None
        super().on_link_lost(why)

    def _welcomed(self, link: WorkerLink) -> None:
        super()._welcomed(link)
        mark = tokenizer_mark(self._tokenizer)
        link.send(OpenCell(cell=self._here, model=self._model, tokenizer=mark))
        self._pinging = asyncio.create_task(self._keep_pinging(link), name=f"ping {self._here}")

    async def _keep_pinging(self, link: WorkerLink) -> None:
        while True:
            link.send(CellPing(self._clock.now_ns()))
            await sleep(PING_S)

    def _measured(self, report: CellReport) -> None:
        rtt_ns = max(1, self._clock.now_ns() - report.sent_ns)
        if self.rtt_ns and rtt_ns > self.rtt_ns:
            rtt_ns = self.rtt_ns + (rtt_ns - self.rtt_ns) // _SMOOTH
        self.rtt_ns, self.cell_report = rtt_ns, report
        self.on_change()


CELL_ENGINE = "cell"
"""The engine's name of a worker that is a peer cell."""


def cell_key(config: CellsConfig) -> bytes:
    """The key that all cells share.

    Raises:
        ConfigError: there is none, or it is too short to be one.
    """
    key = os.environ.get(config.key_env, "").strip().encode()
    if len(key) < KEY_BYTES_MIN:
        why = f"is shorter than {KEY_BYTES_MIN} characters" if key else "is not set"
        raise ConfigError(f"cells.key_env: the environment variable {config.key_env} {why}")
    return key


@dataclass(slots=True, frozen=True, kw_only=True)
class PeerCell:
    """One model of a peer cell."""

    route: str
    config: CellConfig
    here: str
    key: bytes = field(repr=False)
    tokenizer: Tokenizer = field(compare=False)
    clock: Clock = field(compare=False)

    @property
    def id(self) -> WorkerId:
        """See `DesiredWorker`."""
        return WorkerId(f"cell:{self.config.name}/{self.route}")

    async def open(self, registry: Registry) -> Worker:
        """See `DesiredWorker`."""
        key = WorkerKey(self.key, lambda: fresh_key(NONCE_BYTES))
        backend = CellBackend(self.tokenizer, self.clock, key=key, model=self.route, here=self.here)
        backend.connect_to(parse_address(self.config.url), reports_connect_errors=True)
        worker = registry.new(self.id, self.route, backend)
        worker.engine, worker.address, worker.served_model = CELL_ENGINE, self.config.url, self.route
        worker.kind, worker.cell = f"cell:{self.config.name}", self.config
        worker.places = self.config.places
        return worker


def peer_cells(config: CellsConfig, route: str, tokenizer: Tokenizer, clock: Clock) -> Iterator[PeerCell]:
    """The peers of this cell, for one model.

    Raises:
        ConfigError: the key that cells share is not there.
    """
    if not config.peers:
        return
    key = cell_key(config)
    for cell in config.peers:
        yield PeerCell(route=route, config=cell, here=config.here, key=key, tokenizer=tokenizer, clock=clock)
