"""The adapters of one worker of ours: `schedule/adapters.py`, with a thread that reads them.

Everything but the reading happens on the step thread, so nothing here locks. On a CPU the kernels read an
adapter where it lies, so that a slot is a place in the count and no memory.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from penstock.clock import NS_PER_MS, Clock
from penstock.engine.adapters.pauses import GivenUp, Pauses
from penstock.errors import PenstockError
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import (
    AdapterState,
    KeepAdapters,
    LoadAdapter,
    UnloadAdapter,
    WorkerAdapters,
    public,
)
from penstock.schedule.adapters import AdapterPool, InMemory, PooledAdapter
from penstock.schedule.adapters import Released as PoolReleased
from penstock.schedule.adapters import Waiting as PoolWaiting
from penstock.types import RequestId

_log = logging.getLogger(__name__)


class Reads(Protocol):
    """Reads an adapter's files: `files.AdapterReader`."""

    @property
    def bytes_max(self) -> int:
        """Memory that all adapters may take together."""
        ...

    def read(self, directory: Path, digest: str, pause: Callable[[], None]) -> tuple[str, InMemory]:
        """The digest, and the adapter, ready. `pause` is called between pieces of the work."""
        ...


class Fetches(Protocol):
    """Brings an adapter's files here: `fetch.AdapterFetcher`."""

    def fetch(self, path: str, *, again: bool = False) -> Path:
        """The directory that they are in now. `again`: what was brought before will do."""
        ...


@dataclass(slots=True, frozen=True)
class WaitingRequest:
    """A request that names an adapter."""

    owner: int
    message: Submit
    grammar: object


Waiting = PoolWaiting[WaitingRequest]
Released = PoolReleased[WaitingRequest]


@dataclass(slots=True, frozen=True)
class AdapterRead:
    """Mail from the thread that reads."""

    entry: PooledAdapter
    digest: str = ""
    packed: InMemory | None = None
    error: str = ""
    is_given_up: bool = False


@dataclass(slots=True, frozen=True)
class _Job:
    """An adapter that is to be read."""

    number: int
    entry: PooledAdapter


class AdapterManager:
    """Call it on the step thread; `post` is called on the thread that reads."""

    def __init__(
        self,
        reader: Reads,
        fetcher: Fetches,
        clock: Clock,
        *,
        slots: int,
        post: Callable[[AdapterRead], None],
    ) -> None:
        """At most `slots` adapters are in use at once."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # One at most: the pool gives them one by one.
        self._num_jobs = 0
        self.pool: AdapterPool[WaitingRequest] = AdapterPool(
            clock, slots=slots, bytes_max=reader.bytes_max, read=self._read, give_up=self._give_up
        )
        self._pauses = Pauses(clock)
        self._thread = Thread(
            target=_read_all,
            args=(self._jobs, reader, fetcher, post, self._pauses),
            name="worker-adapters",
            daemon=True,
        )
        self._thread.start()

    @property
    def changed(self) -> bool:
        """Whether `reported` says something new."""
        return self.pool.changed

    def close(self) -> None:
        """Read nothing more; an adapter that is being read is dropped."""
        self._jobs.put(None)
        self._pauses.steps_run(False)

    def _read(self, entry: PooledAdapter) -> None:
        self._num_jobs += 1
        self._jobs.put(_Job(self._num_jobs, entry))

    def _give_up(self, entry: PooledAdapter) -> None:
        del entry  # It is the last one.
        self._pauses.give_up(self._num_jobs)

    def steps_run(self, run: bool) -> None:
        """Whether steps follow one another now: the thread that reads leaves them time."""
        self._pauses.steps_run(run, is_awaited=self.pool.is_awaited)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an adapter."""
        return self.pool.num_waiting

    def reported(self) -> WorkerAdapters:
        """Every adapter that this worker was told of, for the gateways."""
        self.pool.changed = False
        states = tuple(
            AdapterState(each.name, each.path, each.digest, each.packed is not None, each.error)
            for each in self.pool.entries()
        )
        return WorkerAdapters(states, room=self.pool.room, read_ms=self.pool.read_ns // NS_PER_MS)

    def take_order(self, order: LoadAdapter | UnloadAdapter | KeepAdapters) -> Released:
        """A gateway wants an adapter to come, to go or to stay."""
        if isinstance(order, UnloadAdapter):
            return self.pool.unload(order.name)
        if isinstance(order, KeepAdapters):
            self.pool.keep(order.names)
        else:
            entry = self.pool.load(order.name, order.path, order.digest, is_wanted=order.is_wanted)
            if entry.error:
                _log.warning("adapter %s: %s", entry.name, entry.error)
        return PoolReleased()

    def submit(self, owner: int, message: Submit, arrived_ns: int, grammar: object) -> Released:
        """A request that names an adapter. It is submitted at once, or waits.

        Raises:
            WorkerUnavailable: there is no such adapter here, or it is another one than the gateway means.
        """
        key, asked = (owner, message.request_id), WaitingRequest(owner, message, grammar)
        return self.pool.submit(key, asked, message.adapter, message.adapter_digest, arrived_ns)

    def abort(self, owner: int, request_id: RequestId) -> bool:
        """A request is gone; False: it does not wait here."""
        return self.pool.abort((owner, request_id))

    def finished(self, entry: PooledAdapter) -> Released:
        """A request that had the adapter has ended."""
        return self.pool.finished(entry)

    def take(self, update: AdapterRead) -> Released:
        """The thread has read an adapter, or could not."""
        if update.entry is not self.pool.reading:
            return PoolReleased()  # It was read for one before this one, which was closed.
        if update.is_given_up:
            self.pool.given_up(update.entry)
            return PoolReleased()
        if update.error:
            _log.warning("adapter %s cannot be loaded: %s", update.entry.name, update.error)
        elif update.packed is not None:
            _log.info(
                "adapter %s is loaded: %d bytes, digest %s",
                update.entry.name, update.packed.num_bytes, update.digest,
            )  # fmt: skip
        return self.pool.take(update.entry, update.packed, update.digest, update.error)


def _read_all(
    jobs: "SimpleQueue[_Job | None]",
    reader: Reads,
    fetcher: Fetches,
    post: Callable[[AdapterRead], None],
    pauses: Pauses,
) -> None:
    """The thread's life: one adapter after the other."""
    while (job := jobs.get()) is not None:
        entry = job.entry
        directory = Path(entry.path)
        try:
            directory = fetcher.fetch(entry.path, again=entry.was_read)
            pauses.begin(job.number)
            digest, packed = reader.read(directory, entry.digest, pauses.pause)
            post(AdapterRead(entry, digest, packed))
        except GivenUp:
            post(AdapterRead(entry, is_given_up=True))
        except PenstockError as error:  # It names where the files came from: nobody knows our copy of them.
            words = str(error).replace(str(directory), entry.path)
            post(AdapterRead(entry, error=public(entry.path, words)))
        except MemoryError:
            post(AdapterRead(entry, error="there is no memory for it"))
        except Exception as error:  # noqa: BLE001 - one file must not end the worker.
            _log.exception("adapter %s", entry.name)
            post(AdapterRead(entry, error=f"reading it failed: {type(error).__name__}"))
