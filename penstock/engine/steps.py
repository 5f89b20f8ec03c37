"""Launching steps, collecting their results and metering them: what lies between the engine's loop and a
runner.

    InlineSteps   collect computes, on the caller's thread: one step after the other
    StepThread    launch hands the plan to a thread that computes; decisions, reports and sockets continue
                  meanwhile
    a device      queues steps by itself (`engine/gpu/runner.py`)

Which one is chosen once, by `wire_steps`. Steps are computed in the order of their launches, and results come
in the same order. `StepMeters` counts whose time they were, what they would have cost at least, and how much
KV memory they held.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal, Protocol, runtime_checkable

from penstock.planning.roofline import CostFloor
from penstock.schedule.plan import StepPlan, StepResult
from penstock.schedule.step import Flight, share_times

Compute = Callable[[StepPlan], StepResult]
END_S = 1.0
"""How long the owner of a thread waits for its end."""
NOTED_MAX = 8
"""Steps that only decode and are not counted yet. The cost of a stream is known so many steps later: one that
its gateway ends meanwhile does not pay for the last of them.
"""
_MEMORY_WORDS = ("out of memory", "can't allocate", "cannot allocate")
"""The messages of torch's allocators, in RuntimeErrors of no special kind on the CPU."""


@runtime_checkable
class Steps(Protocol):
    """Steps on their way."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step, or queue it behind those that were launched before."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step that was launched; waits for it.

        Raises whatever the step raised, but for a lack of memory: that is `StepResult.out_of_memory`.
        """
        ...


@runtime_checkable
class Prepares(Protocol):
    """A runner that can make use of idle time."""

    def idle(self) -> bool:
        """Prepare one thing (capture a graph that was missed, commit memory). False: nothing is left."""
        ...


def out_of_memory(error: BaseException) -> str | None:
    """The words of an error that says that memory is short; None for every other error."""
    message = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return message
    lowered = message.lower()
    return (
        message
        if isinstance(error, RuntimeError) and any(each in lowered for each in _MEMORY_WORDS)
        else None
    )


def computed(compute: Compute, plan: StepPlan) -> StepResult:
    """The plan's result, where a lack of memory is a result too."""
    try:
        return compute(plan)
    except (MemoryError, RuntimeError) as error:
        why = out_of_memory(error)
        if why is None:
            raise
        return StepResult(plan.step, (), out_of_memory=why)


class InlineSteps:
    """Computes a step when its result is wanted."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._plans: deque[StepPlan] = deque()  # Bounded by the scheduler: FLIGHTS_MAX.

    def launch(self, plan: StepPlan) -> None:
        """See `Steps`."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """See `Steps`."""
        return computed(self._compute, self._plans.popleft())


class StepThread:
    """Computes steps on one thread of its own, which sleeps while there are none.

    Kernels release the interpreter's lock, so what is Python in a step and what is Python around it take
    turns and the arithmetic waits for neither.
    """

    def __init__(self, compute: Compute) -> None:
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()  # Both bounded by FLIGHTS_MAX.
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        # The thread must not keep the runner alive by way of this object, nor the other way round.
        self._thread = threading.Thread(
            target=_compute_all,
            args=(compute, self._plans, self._results),
            name="worker-compute",
            daemon=True,
        )
        self._thread.start()

    def launch(self, plan: StepPlan) -> None:
        """See `Steps`."""
        self._plans.put(plan)

    def collect(self) -> StepResult:
        """See `Steps`."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def __del__(self) -> None:
        self._plans.put(None)
        # The end of the interpreter must not find it inside of torch.
        self._thread.join(END_S)


class DeviceSteps:
    """A runner that queues steps by itself; steps that do not even launch for lack of memory come back in
    order.
    """

    def __init__(self, runner: Steps) -> None:
        self._runner = runner
        self._launched: deque[StepResult | None] = deque()  # None: ask the runner.

    def launch(self, plan: StepPlan) -> None:
        """See `Steps`."""
        try:
            self._runner.launch(plan)
        except (MemoryError, RuntimeError) as error:
            why = out_of_memory(error)
            if why is None:
                raise
            self._launched.append(StepResult(plan.step, (), out_of_memory=why))
        else:
            self._launched.append(None)

    def collect(self) -> StepResult:
        """See `Steps`."""
        failed = self._launched.popleft()
        return self._runner.collect() if failed is None else failed


def wire_steps(runner: object, compute: Compute, overlap: Literal["auto", "on", "off"]) -> tuple[Steps, int]:
    """How a runner's steps are launched, and how many may be in flight.

    "auto" is on where the device queues steps, and off on the processor: see docs/engine.md.
    """
    depth = 1 if overlap == "off" else 2
    if isinstance(runner, Steps):
        return DeviceSteps(runner), depth
    if overlap == "on":
        return StepThread(compute), depth
    return InlineSteps(compute), 1


def _compute_all(
    compute: Compute,
    plans: "SimpleQueue[StepPlan | None]",
    results: "SimpleQueue[StepResult | BaseException]",
) -> None:
    """The thread's life: one step after the other, until None comes."""
    while (plan := plans.get()) is not None:
        try:
            results.put(computed(compute, plan))
        except BaseException as error:  # noqa: BLE001 It is raised again where the result is collected.
            results.put(error)


class StepMeters:
    """The figures of one engine's steps. `count` before `device_ns` of a request or the figures are read.

    A step is noted when it is over and counted with the next few: a step reads all of the model's weights, so
    that behind it this code comes from memory again, which takes longer than the code itself.
    """

    def __init__(self, floor: CostFloor | None, block_tokens: int) -> None:
        """`floor`: None if the device's least time is not known."""
        self._floor, self._block_tokens = floor, block_tokens
        self._noted: list[tuple[Flight, int]] = []
        self._unshared_ns = self._held_blocks = 0

    def step_over(self, flight: Flight, spent_ns: int | None, num_blocks: int) -> None:
        """A step is over, after which so many KV blocks are held. Its requests share the time since the last
        one that computed anything: `spent_ns` since any; None: that time is nobody's.
        """
        self._held_blocks += num_blocks
        self._unshared_ns = 0 if spent_ns is None else self._unshared_ns + spent_ns
        if not flight.plan.work:
            return
        self._noted.append((flight, self._unshared_ns))
        self._unshared_ns = 0
        if len(self._noted) >= NOTED_MAX or not flight.only_decodes:
            self.count()

    def count(self) -> None:
        """Count the steps that were noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        share_times(noted)
        if self._floor is not None:
            for flight, _ in noted:
                self._floor.count(flight.shape)

    @property
    def memory_ns(self) -> int:
        """See `CostFloor`; 0 if it is not known."""
        return 0 if self._floor is None else int(self._floor.memory_ns)

    @property
    def floor_ns(self) -> int:
        """See `CostFloor`; 0 if it is not known."""
        return 0 if self._floor is None else int(self._floor.floor_ns)

    @property
    def kv_held_tokens(self) -> int:
        """Tokens that the blocks in use could hold, summed over steps."""
        return self._held_blocks * self._block_tokens
