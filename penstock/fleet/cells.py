"""Peer cells as workers: one for each peer and model, under the peer's name."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.backends.engine.cell import CellBackend
from penstock.backends.engine.link import WorkerKey
from penstock.clock import Clock
from penstock.config.cells import CellConfig, CellsConfig
from penstock.errors import ConfigError
from penstock.fleet.registry import Registry, Worker
from penstock.protocol.address import KEY_BYTES_MIN, NONCE_BYTES, parse_address
from penstock.rng import fresh_key
from penstock.text.tokenizer import Tokenizer
from penstock.types import WorkerId

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
