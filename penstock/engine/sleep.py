"""An engine that is asleep: what it keeps, what it costs, and what wakes it.

The process stays: to start one and import torch takes seconds, and its memory without weights is what a
sleeping model costs. The first plan stays, so that a model comes back with the same KV cache, whatever else
has taken memory meanwhile.
"""

import gc
import importlib
import sys
from typing import Protocol, runtime_checkable

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.engine.kv_event_publisher import KVEventPublisher
from penstock.engine.mailbox import DrainAsked, KVEventsAsked, Mailbox, Ordered
from penstock.engine.memory import own_memory_bytes, trim_malloc
from penstock.engine.serve_socket import WorkerServer
from penstock.protocol.address import WorkerLaunch
from penstock.protocol.worker import Asleep, ModelInfo
from penstock.protocol.worker_parts import Wake

LOAD_BYTES_PER_S = 500_000_000
LOAD_BASE_S = 1
"""The assumed duration of a first load, until one was measured."""
PLAN = "plan_model"
"""The function beside a runner's factory that says what it would load."""


@runtime_checkable
class WarmsUpAgain(Protocol):
    """A runner that needs less to be ready again than the first time."""

    def warm_up_again(self) -> None:
        """Run a step."""
        ...


class Bed:
    """The facts of a model that is not in memory."""

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
        """The report to gateways."""
        assert self._info is not None, "it was planned or loaded"
        return Asleep(info=self._info, wake_ns=self._wake_ns, memory_bytes=own_memory_bytes(), why=self.why)

    def clean(self) -> None:
        """Return the memory of the model that was just released."""
        gc.unfreeze()  # Loading froze what it made: cycles in it would never be found.
        gc.collect()
        gc.freeze()  # Only libraries are left: after a wake the collector looks at newer objects alone.
        trim_malloc()
        torch = sys.modules.get("torch")  # A runner may do without it.
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # Else torch keeps freed memory of a device from other processes.

    def rest(self, mailbox: Mailbox, server: WorkerServer, feed: KVEventPublisher) -> bool:
        """Wait until a request needs an answer; False: it is to end.

        No request comes while it sleeps. It gets the list of adapters again when it is awake.
        """
        is_woken = False
        while not is_woken:
            for each in mailbox.take(wait=True):
                if isinstance(each, DrainAsked):
                    return False
                if isinstance(each, KVEventsAsked):
                    server.start_kv_events(each.connection, feed.subscribe(each.epoch, each.from_sequence))
                is_woken |= isinstance(each, Ordered) and isinstance(each.order, Wake)
        return True
