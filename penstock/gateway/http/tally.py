"""What one generation request used and how it went: the source of its metrics and of its line in the access log."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import ClientError, Overloaded, WorkerUnavailable
from penstock.policy.lifecycle.life import continued
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
_NOTHING = Usage()


@dataclass(slots=True, kw_only=True)
class Tally:
    """Filled while the request runs. Times are the gateway's clock in nanoseconds."""

    model: str
    endpoint: Endpoint
    num_choices: int = 1
    choices_per_prompt: int = 1
    started_ns: int
    first_ns: int | None = None
    """When the first output of any choice came."""
    ended_ns: int | None = None
    outcome: OutcomeLabel | None = None
    usages: dict[int, Usage] = field(default_factory=dict[int, Usage])
    """By index of the choice."""
    carried: dict[int, Usage] = field(default_factory=dict[int, Usage])
    """Of choices that go on on another worker: what was used until they left the last one."""

    def finished(self, index: int, reason: FinishReason, usage: Usage) -> None:
        """A choice is over. The first choice's ending stands for the request, if nothing worse happens."""
        before = self.carried.get(index)
        self.usages[index] = usage if before is None else continued(before, usage)
        if index == 0 and self.outcome is None:
            self.outcome = _OUTCOMES.get(reason)

    def break_off(self) -> None:
        """Every choice that is not over will go on, or begin again if the client has seen nothing."""
        if self.first_ns is None:
            self.usages.clear()
        else:
            self.carried.update(self.usages)

    def usage(self) -> UsageBody:
        """The sum: every prompt once, every choice's answer."""
        total = self.total()
        return UsageBody(
            prompt_tokens=total.prompt_tokens,
            completion_tokens=total.completion_tokens,
            total_tokens=total.prompt_tokens + total.completion_tokens,
            prompt_tokens_details=CachedTokens(total.cached_tokens),
        )

    def total(self) -> Usage:
        """All choices together, as the ledger counts them; times are the first choice's."""
        if self.num_choices == 1:
            return self.usages.get(0, _NOTHING)
        usages, firsts = (
            list(self.usages.values()),
            [usage for i, usage in self.usages.items() if i % self.choices_per_prompt == 0],
        )
        first = self.usages.get(0, _NOTHING)
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            host_cached_tokens=sum(usage.host_cached_tokens for usage in firsts),
            queue_ns=first.queue_ns,
            prefill_ns=first.prefill_ns,
            decode_ns=first.decode_ns,
            steps=sum(usage.steps for usage in usages),
            computed_tokens=sum(usage.computed_tokens for usage in usages),
            preemptions=sum(usage.preemptions for usage in usages),
            kv_block_ns=sum(usage.kv_block_ns for usage in usages),
            device_ns=sum(usage.device_ns for usage in usages),
        )

    def ttft_ns(self) -> int | None:
        """Arrival to first output, if there was one."""
        return None if self.first_ns is None else self.first_ns - self.started_ns

    def record(self, now_ns: int) -> RequestMeasurement:
        """The request as it is counted; `now_ns` is its end."""
        usage = self.total()
        longest = max((u.completion_tokens for u in self.usages.values()), default=0)
        ended_ns = now_ns if self.ended_ns is None else self.ended_ns
        tpot_ns = None
        if self.first_ns is not None and longest > 1:
            tpot_ns = (ended_ns - self.first_ns) // (longest - 1)
        return RequestMeasurement(
            endpoint=self.endpoint,
            outcome=self.outcome or OutcomeLabel.ERROR,
            duration_ns=now_ns - self.started_ns,
            queue_ns=self.usages[0].queue_ns if 0 in self.usages else None,
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
