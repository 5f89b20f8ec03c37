"""What one generation request used and how it went: the source of its metrics and of its line in the access
log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import ClientError, Overloaded, WorkerUnavailable
from penstock.policy.requests.usage_sum import UsageSum
from penstock.protocol.openai import CachedTokens, UsageBody
from penstock.telemetry.catalog import Endpoint, OutcomeLabel
from penstock.telemetry.metrics import RequestMeasurement
from penstock.types import FinishReason, Usage

_OUTCOMES: Mapping[FinishReason, OutcomeLabel] = {
    FinishReason.STOP: OutcomeLabel.STOP,
    FinishReason.LENGTH: OutcomeLabel.LENGTH,
    FinishReason.TOOL_CALLS: OutcomeLabel.TOOL_CALLS,
    FinishReason.BUDGET: OutcomeLabel.BUDGET,
}


@dataclass(slots=True, kw_only=True)
class Tally:
    """Filled while the request runs. Times are the gateway's clock in nanoseconds."""

    model: str
    endpoint: Endpoint
    num_choices: int = 1
    started_ns: int
    first_ns: int | None = None
    """When the first output of any choice came."""
    ended_ns: int | None = None
    outcome: OutcomeLabel | None = None
    usages: UsageSum = field(default_factory=UsageSum)

    def ended(self, index: int, reason: FinishReason, usage: Usage) -> None:
        """A choice's stream is over.

        The first choice's ending stands for the request, if nothing worse happens.
        """
        self.usages.ended(index, usage)
        if index == 0 and self.outcome is None:
            self.outcome = _OUTCOMES.get(reason)

    def usage(self) -> UsageBody:
        """The sum: every prompt once, every choice's answer."""
        total = self.usages.total()
        return UsageBody(
            prompt_tokens=total.prompt_tokens,
            completion_tokens=total.completion_tokens,
            total_tokens=total.prompt_tokens + total.completion_tokens,
            prompt_tokens_details=CachedTokens(total.cached_tokens),
        )

    def ttft_ns(self) -> int | None:
        """Arrival to first output, if there was one."""
        return None if self.first_ns is None else self.first_ns - self.started_ns

    def record(self, now_ns: int) -> RequestMeasurement:
        """The request as it is counted; `now_ns` is its end."""
        usage, first, longest = self.usages.total(), self.usages.of(0), self.usages.longest
        ended_ns = now_ns if self.ended_ns is None else self.ended_ns
        tpot_ns = None
        if self.first_ns is not None and longest > 1:
            tpot_ns = (ended_ns - self.first_ns) // (longest - 1)
        return RequestMeasurement(
            endpoint=self.endpoint,
            outcome=self.outcome or OutcomeLabel.ERROR,
            duration_ns=now_ns - self.started_ns,
            queue_ns=None if first is None else first.queue_ns,
            ttft_ns=self.ttft_ns(),
            tpot_ns=tpot_ns,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.completion_tokens,
        )


def outcome_of(error: Exception) -> OutcomeLabel:
    """How a request that failed with this error is counted."""
    if isinstance(error, ClientError):
        return OutcomeLabel.REJECTED
    if isinstance(error, Overloaded | WorkerUnavailable):
        return OutcomeLabel.SHED
    return OutcomeLabel.ERROR
