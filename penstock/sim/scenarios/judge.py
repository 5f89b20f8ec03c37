"""Which requests of a run were answered as promised: what goodput counts, by what the workers really take and
not by what gateways learned.

promise   by band and tier (policy/admission/promise.py), never less than `idle_factor` times what an idle
          worker takes for the request:
its uncached prompt in steps of its own, and one row's step per further token
"""

from collections.abc import Iterable, Mapping

from penstock.config.routing import AdmissionConfig
from penstock.planning.step_time import StepShape, StepTime
from penstock.policy.admission.promise import IDLE_FACTOR, Promise, Promises
from penstock.policy.record import Outcome
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.sim.traffic.request import RequestRecord
from penstock.sim.world.spec import PoolSpec
from penstock.sim.world.worker import SimWorkerSpec

_CONTEXT = 512
"""Tokens of the row whose step is the idle worker's time per token."""


class Judge:
    """Of one setup's records."""

    def __init__(
        self, promised: AdmissionConfig, pools: Iterable[PoolSpec], tenants: Mapping[str, Tenant]
    ) -> None:
        """`promised` is what the requests are held against, whatever the gateways were told."""
        self._factor, self._promises, self._tenants = IDLE_FACTOR, Promises(promised), tenants
        self._workers = {pool.model: pool.worker for pool in pools}
        self._tpots = {
            model: worker.step_time.step_ns(StepShape(1, 0, 0, _CONTEXT, 0))
            for model, worker in self._workers.items()
        }

    def promise(self, record: RequestRecord) -> Promise:
        """What a request that was answered was promised."""
        tier = self._tenants.get(record.tenant, ANONYMOUS).tier
        promise = self._promises.of(tier=tier, band=record.band)
        idle_ns = idle_ttft_ns(self._workers[record.model], record.prompt_tokens, record.cached_tokens)
        return promise.on(self._factor, idle_ns, self._tpots[record.model])

    def good(self, record: RequestRecord) -> bool:
        """Whether it was answered as promised."""
        if record.outcome is not Outcome.FINISHED or record.first_ns < 0:
            return False
        return self.promise(record).is_kept(record.ttft_ns, record.tpot_ns)


def idle_ttft_ns(worker: SimWorkerSpec, prompt_tokens: int, cached_tokens: int) -> int:
    """What a worker without anything else takes for a prompt."""
    law: StepTime = worker.step_time
    total, done = 0, cached_tokens
    while done < prompt_tokens:
        tokens = min(worker.engine.step_tokens, prompt_tokens - done)
        pairs = tokens * done + tokens * (tokens + 1) // 2
        total += law.step_ns(StepShape(0, 1, tokens, done + tokens, pairs))
        done += tokens
    return total
