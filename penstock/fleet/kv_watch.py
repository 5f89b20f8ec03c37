"""Keeps the locality equal to the registry: each worker's part of the KV index comes, listens and goes with
the worker.

our workers whose blocks' key is known    their own connection tells their events (backends/engine/kv.py)
others, with an address of KV events      a feed of their own (kv_event_subscriber.py)
all others                                predictions and audits only
"""

import asyncio

from penstock.backends.engine.backend import EngineBackend
from penstock.errors import ConfigError
from penstock.fleet.kv_event_subscriber import KVEventSubscriber
from penstock.fleet.registry import Registry
from penstock.fleet.worker import Worker
from penstock.kv.events import KVEventBatch
from penstock.kv.index.limits import KVIndexLimits
from penstock.kv.index.locality import KVLocality, LocalityStatistics
from penstock.kv.index.vllm_events import events_of_engine
from penstock.kv.index.worker_cache_view import StreamState, WorkerCacheView
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import WorkerId


class KVWatch:
    """One for each gateway process.

    `start` it on the event loop; `close` it when nothing is dispatched any more.
    """

    def __init__(self, registry: Registry, locality: KVLocality, config: KVIndexLimits, log: Log) -> None:
        self.locality = locality
        self._registry, self._config, self._log = registry, config, log
        self._feeds: dict[WorkerId, KVEventSubscriber] = {}
        self._epochs: dict[WorkerId, int] = {}
        self._unmatched: set[WorkerId] = set()
        """Those that were warned of."""
        self._num_replays = 0  # Of feeds that are closed.
        self._closing: set[asyncio.Task[None]] = set()

    def statistics(self, now_ns: int) -> LocalityStatistics:
        """For metrics; takes a while."""
        num_replays = self._num_replays + sum(feed.num_replays for feed in self._feeds.values())
        return self.locality.statistics(now_ns, num_replays=num_replays)

    def start(self) -> None:
        """Take in who is there, and everybody who comes."""
        self._registry.listen(self._changed)
        for worker in self._registry:
            self._changed(worker)

    async def close(self) -> None:
        """Stop listening to anybody."""
        self._registry.unlisten(self._changed)
        for worker_id in list(self._feeds):
            self._close_feed(worker_id)
        if self._closing:
            await asyncio.wait(self._closing)

    def _changed(self, worker: Worker) -> None:
        if worker.state is WorkerState.GONE:
            self.locality.remove(worker.id)
            self._epochs.pop(worker.id, None)
            self._unmatched.discard(worker.id)
            self._close_feed(worker.id)
            return
        cache_view = self.locality.get(worker.id)
        if cache_view is None:
            cache_view = self.locality.add(
                worker.id, model=worker.route, is_own=worker.shares_key, key=worker.hash_key
            )
            self._listen(worker, cache_view)
        elif self._epochs[worker.id] != worker.epoch and cache_view.state is StreamState.UNKNOWN:
            cache_view.restarted()  # Streams of events find out by themselves, and perhaps before this.
        self._epochs[worker.id] = worker.epoch
        info = worker.backend.status.info
        if worker.shares_key and worker.is_ready and info is not None:
            self.locality.identify(worker.id, info.identity)

        if cache_view.is_unmatched != (worker.id in self._unmatched):
            self._tell_unmatched(worker, cache_view)

    def _tell_unmatched(self, worker: Worker, cache_view: WorkerCacheView) -> None:
        """Say once that a worker's events are of no use, and once that they are again."""
        if not cache_view.is_unmatched:
            self._unmatched.discard(worker.id)
            self._log.info("a worker's KV events are of use again", worker=worker.id)
            return
        self._unmatched.add(worker.id)
        info = worker.backend.status.info
        self._log.warning(
            "prompts hit a worker's cache, but its KV events name none of their blocks: routing by cache is "
            "off for it",
            worker=worker.id,
            model=worker.route,
            identity=info.identity if info is not None else "",
            answers=cache_view.num_unreported,
        )

    def _listen(self, worker: Worker, cache_view: WorkerCacheView) -> None:
        if worker.shares_key and isinstance(worker.backend, EngineBackend):

            def hear(batch: KVEventBatch) -> None:
                cache_view.hear(events_of_engine(batch))

            worker.backend.hear_kv_events(hear)
        elif worker.kv_events:
            try:
                feed = KVEventSubscriber(
                    cache_view,
                    events=worker.kv_events,
                    replay=worker.kv_replay,
                    config=self._config,
                    log=self._log,
                    worker=worker.id,
                )
            except ConfigError as error:
                self._log.error("a worker's KV events cannot be heard", worker=worker.id, error=error)
            else:
                feed.start()
                self._feeds[worker.id] = feed

    def _close_feed(self, worker_id: WorkerId) -> None:
        if (feed := self._feeds.pop(worker_id, None)) is not None:
            self._num_replays += feed.num_replays
            task = asyncio.get_running_loop().create_task(feed.close(), name=f"close KV feed of {worker_id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
