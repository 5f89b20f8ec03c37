"""An engine that is asleep: what it keeps, what it costs, and what wakes it.

The process stays: to start one and import torch takes seconds, and its memory without weights is what a
sleeping model costs. What was planned at first stays planned, so that a model comes back with the same KV
cache, whatever else has taken memory meanwhile.
"""

import gc
import importlib
import sys
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.engine.kv_event_publisher import KVEventPublisher
from penstock.engine.mailbox import DrainAsked, KVEventsAsked, Mail, Mailbox, Ordered, Submitted
from penstock.engine.memory import own_memory_bytes, trim_malloc
from penstock.engine.serve_socket import WorkerServer
from penstock.protocol.address import WorkerLaunch
from penstock.protocol.worker import Asleep, ModelInfo, Output, RequestFinished, Stats
from penstock.protocol.worker_parts import Wake
from penstock.types import FinishReason, Usage

LOAD_BYTES_PER_S = 500_000_000
LOAD_BASE_S = 1
"""What a first load is taken for, until one was measured."""
PLAN = "plan_model"
"""The function beside a runner's factory that says what it would load."""
NO_STATS = Stats(step=0, running=0, waiting=0, blocks_total=0, blocks_used=0, blocks_cached=0)


@runtime_checkable
class WarmsUpAgain(Protocol):
    """A runner that needs less to be ready again than the first time."""

    def warm_up_again(self) -> None:
        """Run a step."""
        ...


class Bed:
    """What is known of a model that is not in memory."""

    def __init__(self, launch: WorkerLaunch, clock: Clock) -> None:
        self.launch, self._clock = launch, clock
        """How it is loaded: with what was planned, once that is known."""
        self.why = ""
        """Why it could not be woken."""
        self._info: ModelInfo | None = None
        self._wake_ns = 0

    def plan(self) -> bool:
        """Look at the model without loading it; False if that cannot be done.

        Raises:
            OperatorError: it cannot be served as it is configured.
        """
        module = importlib.import_module(self.launch.runner.partition(":")[0])
        planner = getattr(module, PLAN, None)
        info = None if planner is None else planner(self.launch.model_path, self.launch.engine, self._clock)
        if info is None:
            return False
        self._settle(info)
        self._wake_ns = (LOAD_BASE_S + info.weight_bytes // LOAD_BYTES_PER_S) * NS_PER_S
        return True

    def loaded(self, info: ModelInfo, took_ns: int) -> None:
        """It was loaded, in so long."""
        self._settle(info)
        self._wake_ns, self.why = took_ns, ""

    def _settle(self, info: ModelInfo) -> None:
        if info.kv_bytes:
            engine = msgspec.structs.replace(
                self.launch.engine, kv_memory_bytes=info.kv_bytes, host_kv_memory_bytes=info.host_kv_bytes
            )
            self.launch = msgspec.structs.replace(self.launch, engine=engine)
        self._info = msgspec.structs.replace(info, model=self.launch.model_name)

    def asleep(self) -> Asleep:
        """What gateways are told."""
        assert self._info is not None, "it was planned or loaded"
        return Asleep(info=self._info, wake_ns=self._wake_ns, memory_bytes=own_memory_bytes(), why=self.why)

    def clean(self) -> None:
        """Give the memory back of what was just let go of."""
        gc.unfreeze()  # Loading froze what it made: cycles in it would never be found.
        gc.collect()
        trim_malloc()
        torch = sys.modules.get("torch")  # A runner may do without it.
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # What torch keeps of a device's freed memory nobody else could have.

    def rest(self, mailbox: Mailbox, server: WorkerServer, feed: KVEventPublisher) -> list[Mail] | None:
        """Wait until somebody wants an answer; what it is to deal with first. None: it is to end."""
        kept, is_woken = list[Mail](), False
        while not is_woken:
            for each in mailbox.take(wait=True):
                if isinstance(each, DrainAsked):
                    return None
                if isinstance(each, KVEventsAsked):
                    server.start_kv_events(each.connection, feed.subscribe(each.epoch, each.from_sequence))
                elif isinstance(each, Ordered):
                    is_woken |= isinstance(each.order, Wake)  # Of adapters it is told again when it is awake.
                else:
                    # A request that came while everybody was being told.
                    kept.append(each)
                    is_woken |= isinstance(each, Submitted)
        return kept


def refused(mail: Iterable[Mail], why: str) -> dict[int, list[Output]]:
    """The ends of requests that reached a worker which cannot wake."""
    found: dict[int, list[Output]] = {}
    for each in mail:
        if isinstance(each, Submitted):
            finish = RequestFinished(
                reason=FinishReason.ERROR, usage=Usage(), error=why, error_kind="WorkerUnavailable"
            )
            found.setdefault(each.connection, []).append(Output(each.submit.request_id, (), None, finish))
    return found
