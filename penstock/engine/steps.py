"""Launching steps and collecting their results: what lies between the engine's loop and a runner.

    InlineSteps   collect computes, on the caller's thread: one step after the other
    StepThread    launch hands the plan to a thread that computes; decisions, reports and sockets continue
                  meanwhile
    a device      queues steps by itself (`engine/gpu/runner.py`)

Which one is chosen once, by `wire_steps`. Steps are computed in the order of their launches, and results come
in the same order.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal, Protocol, runtime_checkable

from penstock.schedule.plan import StepPlan, StepResult

Compute = Callable[[StepPlan], StepResult]
END_S = 1.0
"""How long the owner of a thread waits for its end."""
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
        """Prepare one thing (capture a graph that was missed). False: there is nothing to do."""
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
