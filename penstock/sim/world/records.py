"""The records that a simulated gateway writes of requests: their clients' own, and the ledger's line of one
whose gateway is gone.
"""

from penstock.clock import NS_PER_S
from penstock.errors import PenstockError
from penstock.policy.flow import Outcome, Refused, RequestFacts, UsageRecord
from penstock.policy.request import Request
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.world.facts import Ticket


def retry_after_ns(error: PenstockError | None) -> int:
    """When a refused client is to come again; 0: it was not told."""
    return round((getattr(error, "retry_after_s", None) or 0) * NS_PER_S)


def ended_record(end_ns: int, ticket: Ticket, request: Request, error: PenstockError | None) -> RequestRecord:
    """Of a request that was accepted and has ended."""
    assert request.outcome is not None, "what has ended has an outcome"
    asked = ticket.request
    return RequestRecord(
        id=asked.id,
        tenant=asked.tenant,
        model=request.facts.route,
        band=request.facts.tenant.band,
        outcome=request.outcome,
        reason=request.reason or request.error,
        at_ns=asked.at_ns,
        first_ns=ticket.first_ns,
        end_ns=end_ns,
        retry_after_ns=retry_after_ns(error),
        prompt_tokens=request.counted_prompt_tokens,
        cached_tokens=request.counted_cached_tokens,
        completion_tokens=request.completion_tokens,
        attempts=request.attempts,
        migrations=request.migrations,
        worker=request.worker,
        queue_ns=request.queue_ns,
    )


def refused_record(at_ns: int, end_ns: int, facts: RequestFacts, refused: Refused) -> RequestRecord:
    """Of one that was refused."""
    return RequestRecord(
        id=facts.id,
        tenant=facts.tenant.id,
        model=facts.route,
        band=facts.tenant.band,
        outcome=Outcome.REJECTED,
        reason=refused.reason,
        retry_after_ns=retry_after_ns(refused.error),
        at_ns=at_ns,
        end_ns=end_ns,
    )


def lost_usage(wall_ns: int, prompt_tokens: int, request: Request) -> UsageRecord:
    """The journal's line of a request whose gateway is gone."""
    facts = request.facts
    return UsageRecord(
        request_id=facts.id,
        ended_ns=wall_ns,
        tenant=facts.tenant.id,
        requested_model=facts.requested_model,
        served_model=facts.route,
        outcome=Outcome.FAILED,
        error="GatewayLost",
        prompt_tokens=prompt_tokens,
        completion_tokens=request.completion_tokens,
        recovered=True,
    )


def lost_record(end_ns: int, prompt_tokens: int, ticket: Ticket, request: Request) -> RequestRecord:
    """The same as its client sees it."""
    facts = request.facts
    return RequestRecord(
        id=ticket.request.id,
        tenant=facts.tenant.id,
        model=facts.route,
        band=facts.tenant.band,
        outcome=Outcome.FAILED,
        reason="GatewayLost",
        at_ns=ticket.request.at_ns,
        first_ns=ticket.first_ns,
        end_ns=end_ns,
        prompt_tokens=prompt_tokens,
        completion_tokens=request.completion_tokens,
        attempts=request.attempts,
        migrations=request.migrations,
        worker=request.worker,
        queue_ns=request.queue_ns,
    )
