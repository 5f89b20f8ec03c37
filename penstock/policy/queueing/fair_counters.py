"""The fair share counters of one gateway's queues, as gateways that share see and change them.

    gateway a   charges acme 500 ──take──> (model, band, acme, 500) ──heed──>   gateway b counts 500 for acme

Every `SHARE_S` a gateway tells the others what it has charged each tenant since the last time. So each one
starts next what was served least by all of them together, and shares are as even as what is served in that
time. A message that is lost on the way is never sent again: gateways that cannot hear each other are fair by
themselves until they can.

Pure: what carries the words is in gateway/shared/ and in sim/world/store.py.
"""

from collections.abc import Callable, Iterable, Sequence

from penstock.policy.queueing.model_queue import ModelQueue
from penstock.types import TenantId

SHARE_S = 0.2

ServedUnits = tuple[str, int, TenantId, int]
"""Model, band by its place in the configuration, tenant, and what its counter grew by
(schedule/fair_share.py)."""


class FairCounters:
    """The counters of all models."""

    __slots__ = ("_model_queue", "_models")

    def __init__(self, models: Sequence[str], model_queue: Callable[[str], ModelQueue | None]) -> None:
        """`model_queue` finds a model's queue; None if nothing has come for it yet."""
        assert len(set(models)) == len(models), "a model's service is reported once"
        self._models, self._model_queue = models, model_queue

    def take(self) -> tuple[ServedUnits, ...]:
        """The service of tenants here since the last time."""
        model_queues = ((model, self._model_queue(model)) for model in self._models)
        return tuple(
            (model, *each)
            for model, model_queue in model_queues
            if model_queue is not None
            for each in model_queue.queue.take_unreported()
        )

    def heed(self, served: Iterable[ServedUnits]) -> None:
        """Count what another gateway has served."""
        for model, level, tenant, units in served:
            if (model_queue := self._model_queue(model)) is not None:
                model_queue.queue.served_elsewhere(level, tenant, units)
