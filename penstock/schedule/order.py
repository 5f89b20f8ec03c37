"""The order in which waiting requests start, and which one a config asks for: chosen once, where the engine
is wired.

FCFSQueue     smaller priority first, then earlier arrival: a class can starve those below it
AgeingQueue   the same, but a class is only worth so many seconds of waiting: none starves
ClassQueue    by tenant in each class, whoever was served least first; a class goes first until those below
              have waited long enough (fair_queue.py)
"""

from collections.abc import Callable

from penstock.config.engine_settings import EngineSettings
from penstock.schedule.fair_queue import ClassQueue
from penstock.schedule.queue import Order, OrderedQueue, WaitingQueue
from penstock.schedule.request import Request

_NS_PER_S = 1_000_000_000


def waiting_queue(config: EngineSettings) -> WaitingQueue:
    """The queue of `engine.scheduling`."""
    ageing_ns = round(config.priority_ageing_s * _NS_PER_S)
    starvation_ns = round(config.starvation_s * _NS_PER_S)
    match config.scheduling:
        case "fcfs":
            return FCFSQueue(config.max_waiting)
        case "priority":
            return AgeingQueue(config.max_waiting, ageing_ns=ageing_ns, starvation_ns=starvation_ns)
        case "fair":
            return ClassQueue(config.max_waiting, aged_order(ageing_ns, starvation_ns), config.fair_weights)


class FCFSQueue(OrderedQueue):
    """Smaller priority first, then earlier arrival."""

    __slots__ = ()

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, by_class)


class AgeingQueue(OrderedQueue):
    """Smaller priority first, but waiting makes up for it: see `aged_order`."""

    __slots__ = ()

    def __init__(self, capacity: int, *, ageing_ns: int, starvation_ns: int) -> None:
        super().__init__(capacity, aged_order(ageing_ns, starvation_ns))


def by_class(request: Request) -> Order:
    """The order that `submit` gave: class, arrival, submission."""
    return request.order


def aged_order(ageing_ns: int, starvation_ns: int) -> Callable[[Request], Order]:
    """Arrival, later by `ageing_ns` for each class down, and by no more than `starvation_ns` in all.

    Everybody ages alike, so who is before whom never changes while both wait, and the order needs no clock:
    a request of class 2 that has waited for 2 x `ageing_ns` stands level with a fresh one of class 0. The
    starvation clock: who came more than `starvation_ns` later never goes first, whatever the classes.
    """
    assert ageing_ns >= 0 <= starvation_ns, (ageing_ns, starvation_ns)
    bound = starvation_ns // 2

    def key(request: Request) -> Order:
        priority, arrival_ns, number = request.order
        handicap_ns = min(max(priority * ageing_ns, -bound), bound)
        return arrival_ns + handicap_ns, arrival_ns, number

    return key
