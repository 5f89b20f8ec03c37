"""Which version of a model a conversation gets while a rollout runs, and what became of its requests: in one
gateway process. The deciding process is informed every second (fleet/rollouts.py), and says which rollouts
are active.
"""

from collections.abc import Callable, Collection, Sequence

from penstock.policy.rollout.cohorts import Cohort
from penstock.policy.rollout.dealing import ActiveRollout, Assigned
from penstock.policy.rollout.evidence import Observation
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.telemetry.catalog import OutcomeLabel
from penstock.telemetry.counts import RequestMeasurement

UNREPORTED_MAX = 5000
"""Requests that ended since the last was told: of more, a sample that is large enough is reported."""
_FAILED = (OutcomeLabel.ERROR, OutcomeLabel.SHED)
_ANSWERED = (
    OutcomeLabel.STOP,
    OutcomeLabel.TOOL_CALLS,
    OutcomeLabel.LENGTH,
    OutcomeLabel.CONTENT_FILTER,
)
"""Every other end of a request is the client's doing."""


class RolloutTable:
    """Of this process."""

    def __init__(self) -> None:
        self._active: dict[str, ActiveRollout] = {}
        self._unreported: list[Observation] = []

    def adopt(self, active: Collection[ActiveRollout]) -> None:
        """These are active, and no others."""
        self._active = {each.model: each for each in active}

    def copies(self, rollout: str) -> bool:
        """Whether requests are copied to this rollout's candidate."""
        return any(each.shadow for each in self._active.values() if each.id == rollout)

    def assign(
        self, model: str, conversation: Callable[[], str], tenant: Tenant = ANONYMOUS
    ) -> Assigned | None:
        """The version for a conversation that asks for `model`; None: no rollout says anything."""
        rollout = self._active.get(model)
        return None if rollout is None else rollout.assign(conversation, tenant)

    def first(self, model: str) -> str:
        """The version that serves who is in no rollout's canary; empty: the one that stands first."""
        rollout = self._active.get(model)
        return "" if rollout is None else rollout.serves

    def count(self, seen: Observation) -> None:
        """Keep what is to be told."""
        if len(self._unreported) < UNREPORTED_MAX:
            self._unreported.append(seen)

    def take(self) -> Sequence[Observation]:
        """Requests that ended since the last call."""
        unreported, self._unreported = self._unreported, []
        return unreported


def observed(assigned: Assigned, record: RequestMeasurement, rows: int) -> Observation | None:
    """A request of a rollout that has ended; `rows` is how many its worker computed together then. None: it
    counts nothing.
    """
    failed = record.outcome in _FAILED
    if assigned.cohort is Cohort.REST or not (failed or record.outcome in _ANSWERED):
        return None
    return Observation(
        assigned.rollout,
        is_canary=assigned.cohort is Cohort.CANARY,
        group=assigned.group,
        failed=failed,
        cut_off=record.outcome in (OutcomeLabel.LENGTH, OutcomeLabel.CONTENT_FILTER),
        tokens=record.generated_tokens,
        tpot_ns=record.tpot_ns or 0,
        rows=rows,
        prefill_ns=max(0, (record.ttft_ns or 0) - (record.queue_ns or 0)),
        uncached_tokens=record.prompt_tokens - record.cached_tokens,
    )
