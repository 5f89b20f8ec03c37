"""Which waiting order a config asks for: chosen once, where the engine is wired."""

from penstock.config.engine_settings import EngineSettings
from penstock.schedule.fair_queue import ClassQueue
from penstock.schedule.queue import AgeingQueue, FCFSQueue, WaitingQueue, aged_order

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
