"""Keeps the locality equal to the registry: each worker's part of the KV index comes, listens and goes with
the worker.

our workers whose blocks' key is known    their own connection tells their events (backends/engine/backend.py)
others, with an address of KV events      a feed of their own (`KVEventSubscriber`)
all others                                predictions and audits only

A worker's KV events over ZeroMQ, from vLLM's publisher or any that speaks its protocol (ours:
engine/kv_event_publisher.py).

    SUB     <- [topic, sequence, payload]            lossy, in order; a lost connection is told by the
                                                     socket's monitor
    DEALER  -> ["", sequence]                        asked when something is missing, after a lost connection,
                                                     at the start,
            <- ["", topic?, sequence, payload]*      and every `check_s`: the last messages may be the lost
                                                     ones
            <- ["", "", -1, ""]                      the end

Moves bytes; what they mean, what is missing and from where to ask is `kv/index/worker_cache_view.py`'s to
say. Runs on the event loop, which is given back after every few messages; what waits in the sockets is
bounded, and what does not fit there is a gap like any other.
"""

import asyncio
from typing import Any

from penstock.backends.engine.backend import EngineBackend
from penstock.clock import sleep
from penstock.errors import ConfigError
from penstock.fleet.registry import Registry, Worker
from penstock.kv.events import KVEventBatch
from penstock.kv.index.block_names import events_of_engine
from penstock.kv.index.locality import KVLocality, LocalityStatistics
from penstock.kv.index.worker_cache_view import KVIndexLimits, StreamState, WorkerCacheView
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import WorkerId

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
AT_ONCE_MAX = 64
"""Messages that are taken before others on the event loop get their turn."""
MESSAGES_MAX = 20_000
"""That wait in a socket: two times what a publisher keeps by default, so that a replay fits."""
RECONNECT_MS, HEARTBEAT_MS = 100, 5_000
REPLAY_PAUSE_S = 0.05
"""Between two replays, so that a worker that never answers right is not asked without end."""


class KVEventSubscriber:
    """Keeps one worker's residency up to date. `start` it once; `close` it when the worker is gone."""

    def __init__(
        self,
        cache_view: WorkerCacheView,
        *,
        events: str,
        replay: str,
        config: KVIndexLimits,
        log: Log,
        worker: str,
    ) -> None:
        """`events` and `replay` are ZeroMQ addresses; with an empty `replay` missed events cannot be asked
        for.

        Raises:
            ConfigError: pyzmq is not installed, or an address is none.
        """
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ConfigError(f"{worker}: kv_events: needs pyzmq; install penstock[events]") from error
        self.cache_view = cache_view
        self.num_replays = 0
        self._zmq: Any = zmq
        self._config, self._log, self._worker = config, log, worker
        self._replay_address = replay
        self._context: Any = zmq.asyncio.Context()
        self._wake = asyncio.Event()  # Something is to be asked for.
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: StreamState | None = None
        try:
            self._sub = self._socket(zmq.SUB, events, "kv_events", subscribe=True)
            if replay:
                self._socket(zmq.DEALER, replay, "kv_replay").close()
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def start(self) -> None:
        """Listen from now on."""
        self._wake.set()
        self._tasks = [
            asyncio.create_task(self._listen(), name=f"KV events of {self._worker}"),
            asyncio.create_task(self._ask(), name=f"KV replays of {self._worker}"),
        ]

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str, key: str, *, subscribe: bool = False) -> Any:  # noqa: ANN401
        zmq, config = self._zmq, self._config
        made = self._context.socket(kind)
        made.linger, made.rcvhwm, made.maxmsgsize = 0, MESSAGES_MAX, config.message_bytes_max
        made.reconnect_ivl, made.reconnect_ivl_max = RECONNECT_MS, int(config.reconnect_max_s * 1000)
        made.heartbeat_ivl, made.heartbeat_timeout = HEARTBEAT_MS, 3 * HEARTBEAT_MS
        if subscribe:
            made.subscribe(b"")
            self._monitor = made.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            made.connect(address)
        except zmq.ZMQError as error:
            made.close()
            raise ConfigError(f"{self._worker}: {key}: {address}: {error.strerror}") from error
        return made

    # --- received messages ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        zmq = self._zmq
        poller = zmq.asyncio.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._sub, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            # First: what comes after a lost connection may be another process's.
            if self._monitor in ready:
                await self._monitor.recv_multipart()
                self.cache_view.reconnected()
                self._wake.set()
            elif self._sub in ready:
                await self._take_some()
            self._tell()
            await sleep(0)

    async def _take_some(self) -> None:
        zmq, cache_view = self._zmq, self.cache_view
        for _ in range(AT_ONCE_MAX):
            try:
                frames = await self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
                cache_view.nonsense()
                continue
            cache_view.live(int.from_bytes(frames[1], "big"), frames[2])
            if cache_view.wanted is not None:
                self._wake.set()

    # --- what is asked for -----------------------------------------------------------------------------

    async def _ask(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.check_s):
                    await self._wake.wait()
            except TimeoutError:
                pass  # Nothing is known to be missing: that is what is checked.
            self._wake.clear()
            if self.cache_view.names.refused:
                continue
            first = self.cache_view.ask()
            is_answered = False
            if self._replay_address:
                is_answered = await self._replay(first)
            elif self.cache_view.wanted is None:
                continue
            self.cache_view.end_of_replay(is_answered=is_answered)
            self._tell()
            if self.cache_view.wanted is not None:
                self._wake.set()
            await sleep(REPLAY_PAUSE_S)

    async def _replay(self, first: int) -> bool:
        """Pass on what is sent again; False if the end did not come."""
        self.num_replays += 1
        dealer = self._socket(self._zmq.DEALER, self._replay_address, "kv_replay")
        try:
            await dealer.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
            num_batches = 0
            while True:
                async with asyncio.timeout(self._config.replay_timeout_s):
                    frames = await dealer.recv_multipart()
                if len(frames) < 3 or len(frames[-2]) != SEQUENCE_BYTES:
                    self.cache_view.nonsense()
                    return False
                if frames[-2] == END_OF_REPLAY:
                    return True
                self.cache_view.again(int.from_bytes(frames[-2], "big"), frames[-1])
                num_batches += 1
                if num_batches % AT_ONCE_MAX == 0:
                    await sleep(0)
        except TimeoutError:
            return False
        finally:
            dealer.close()

    def _tell(self) -> None:
        """Say in the log what changed, once."""
        state, refused = self.cache_view.state, self.cache_view.names.refused
        if state is self._reported:
            return
        if refused and state is StreamState.UNKNOWN:
            self._log.error(
                "a worker's KV events are of no use: only predictions count", worker=self._worker, why=refused
            )
        elif state is StreamState.SYNCED and self._reported is not StreamState.SYNCED:
            self._log.info(
                "a worker's KV events are heard", worker=self._worker, gaps=self.cache_view.num_gaps
            )
        self._reported = state


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
            self.locality.maker(worker.route).digests = self._registry.of(worker.route).adapter_digests

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
