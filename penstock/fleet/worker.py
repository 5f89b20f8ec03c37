"""One worker as the registry keeps it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock.backends.base import Backend
from penstock.clock import NS_PER_S
from penstock.policy.resilience.worker_state import WorkerLife, WorkerState
from penstock.types import WorkerId

NOTE_S_MAX = 600
"""A note of what happened to a worker that is ready again is shown for so long."""
Stop = Callable[[float], Awaitable[None]]
"""Lets a worker's streams end, up to so many seconds, and then ends it. Nothing of it is left afterwards."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One worker. Its fields are the registry's to write; everybody may read them."""

    id: WorkerId
    route: str
    """The model that it computes, by the name that clients use."""
    backend: Backend
    life: WorkerLife
    engine: str = "penstock"
    kind: str = ""
    """Workers of one kind are about as fast as each other."""
    address: str = ""
    """Where it listens, for people and for other gateways of this server."""
    served_model: str = ""
    """What it must say that it serves; empty takes what it says."""
    shares_key: bool = False
    """It runs our engine and names its KV blocks with a key that is known here: `hash_key`, or else the
    launcher's."""
    hash_key: bytes = field(default=b"", repr=False)
    """The key of a worker that somebody else started, derived from the one that it shares with its
    gateways."""
    kv_events: str = ""
    """ZeroMQ address of its KV events, where they do not come over the backend's own connection."""
    kv_replay: str = ""
    """And of missed ones."""
    stop: Stop | None = None
    """None: there is nothing to end but the backend's connection."""
    heard_ns: int = 0
    """When it last said anything; 0: never."""
    problem: str = ""
    """Why it was refused; empty if it was not."""
    is_silent: bool = False
    """It is suspect because it does not answer its backend."""
    drained: asyncio.Task[None] | None = None
    """Its end, once that has begun."""

    @property
    def state(self) -> WorkerState:
        """Where it is."""
        return self.life.state

    @property
    def epoch(self) -> int:
        """Which of its lives this is."""
        return self.life.epoch

    @property
    def is_ready(self) -> bool:
        """Whether it counts as capacity."""
        return self.life.is_ready

    def notes(self, wall_ns: int) -> list[str]:
        """What people should know of it, each with its time; not what happened long ago to a worker that is
        well again.
        """
        since_ns = wall_ns - NOTE_S_MAX * NS_PER_S if self.is_ready else 0
        return [
            f"{_utc(note.at_ns)}: {note.text}"
            for note in self.backend.status.notes
            if note.lasts or note.at_ns >= since_ns
        ]

    @property
    def stage(self) -> str:
        """What it is doing, in words."""
        if self.problem:
            return f"refused: {self.problem}"
        said = self.backend.status.stage
        return f"suspect: {said}" if self.state is WorkerState.SUSPECT else said


def _utc(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
