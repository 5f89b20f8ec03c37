"""What holds in a simulated engine beside its own invariants: who is started before whom, and how many run
and wait.
"""

from collections.abc import Sequence

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.schedule.request import Request, Status
from penstock.sim.world.messages import Began, WorkerMessage
from penstock.sim.world.worker import SimWorker


def over_engine_cap(worker: SimWorker) -> str:
    """More runs or waits than the engine may have; empty: no."""
    limits, now = worker.spec.engine, worker.scheduler.statistics()
    if now.running > limits.max_running:
        return f"{worker.id} runs {now.running} requests, and may run {limits.max_running}"
    # Whoever was preempted waits again, on top of the bound.
    if now.waiting > limits.max_waiting + limits.max_running:
        return f"{worker.id} has {now.waiting} requests waiting, and may have {limits.max_waiting}"
    return ""


def inverted_in_engine(worker: SimWorker, messages: Sequence[WorkerMessage]) -> str:
    """A request that has begun was started before one of a better class that had come; empty: none was.

    A class goes before those below it until one of theirs has waited `priority_ageing_s` longer per class, or
    `starvation_s` in all.
    """
    config, began = worker.spec.engine, {message.id for message in messages if isinstance(message, Began)}
    if not began or config.scheduling != "fair" or 0 < config.kv_quota_fraction < 1:
        return ""
    requests = list(worker.requests())
    waiting = [request for request in requests if request.status is Status.WAITING]
    for started in (request for request in requests if request.request_id in began):
        at_ns, level = started.started_ns, started.order[0]
        for passed in waiting:
            if at_ns is None or passed.order[0] >= level or passed.arrival_ns >= at_ns:
                continue
            # The oldest of a class speaks for it: whoever has come of it until then may have been that.
            peers = (each for each in requests if each.order[0] == level and each.arrival_ns <= at_ns)
            if all(_turn_ns(config, passed) < _turn_ns(config, each) for each in peers):
                waited_ms = (at_ns - passed.arrival_ns) // 1_000_000
                return (
                    f"{started.request_id} (class {level}) is started on {worker.id} before "
                    f"{passed.request_id} (class {passed.order[0]}), which had waited {waited_ms} ms there"
                )
    return ""


def _turn_ns(config: EngineSettings, request: Request) -> int:
    """When it came, later by what its class stands behind the best."""
    bound = int(config.starvation_s * NS_PER_S) // 2
    behind_ns = int(request.order[0] * config.priority_ageing_s * NS_PER_S)
    return request.arrival_ns + min(max(behind_ns, -bound), bound)
