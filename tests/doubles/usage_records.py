"""Usage records for tests, and a sink that keeps them in memory and fails on demand."""

from collections.abc import Sequence

from penstock.policy.flow import Outcome, UsageRecord
from penstock.telemetry.ledger_segment import Progress
from penstock.telemetry.ledger_sink import SinkError

T0_NS = 1_700_000_000_000_000_000


def opened(request_id: str, *, tenant: str = "acme", model: str = "m", ended_ns: int = T0_NS) -> UsageRecord:
    """What is written when a request is accepted."""
    return UsageRecord(
        request_id=request_id,
        ended_ns=ended_ns,
        tenant=tenant,
        key_prefix="sk-abc",
        requested_model=model,
        served_model=model,
        outcome=Outcome.FAILED,
        price_version="v1",
    )


def closed(
    request_id: str,
    *,
    tenant: str = "acme",
    model: str = "m",
    ended_ns: int = T0_NS + 5_000_000,
    completion_tokens: int = 7,
    cost_micros: int = 70,
) -> UsageRecord:
    """What is written when it is over."""
    return UsageRecord(
        request_id=request_id,
        ended_ns=ended_ns,
        tenant=tenant,
        key_prefix="sk-abc",
        requested_model=model,
        served_model=model,
        worker="w0",
        outcome=Outcome.FINISHED,
        finish_reason="stop",
        prompt_tokens=20,
        cached_tokens=16,
        completion_tokens=completion_tokens,
        attempts=1,
        total_us=5_000,
        cost_micros=cost_micros,
        price_version="v1",
    )


def progress(request_id: str, completion_tokens: int, *, at_ns: int = T0_NS + 1_000_000) -> Progress:
    """What is written at a slice boundary."""
    return Progress(
        request_id=request_id,
        at_ns=at_ns,
        prompt_tokens=20,
        cached_tokens=16,
        completion_tokens=completion_tokens,
        cost_micros=10 * completion_tokens,
        worker="w0",
    )


class MemorySink:
    """Keeps the first record of every id; `failures` writes from now on fail, after keeping half of the
    batch.
    """

    def __init__(self) -> None:
        self.records: dict[str, UsageRecord] = {}
        self.failures = 0
        self.writes = 0
        self.is_closed = False

    def write(self, records: Sequence[UsageRecord]) -> None:
        self.writes += 1
        fails = self.failures > 0
        for record in records[: len(records) // 2] if fails else records:
            self.records.setdefault(record.request_id, record)
        if fails:
            self.failures -= 1
            raise SinkError("told to fail")

    def close(self) -> None:
        self.is_closed = True
