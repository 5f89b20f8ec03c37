"""The facts of a request that is sent to a peer cell (gateway/cells/guests.py reads it)."""

from penstock.policy.request import Request
from penstock.protocol.cells import Guest


def guest_of(request: Request, now_ns: int, trace: tuple[tuple[str, str], ...]) -> Guest:
    """The facts for a peer that a request is sent to now."""
    facts, waited_ns = request.facts, now_ns - request.arrived_ns

    def left(time_ns: int) -> int:
        return max(1, time_ns - waited_ns) if time_ns else 0

    return Guest(
        request_id=facts.id,
        tenant=facts.tenant.id,
        tier=facts.tenant.tier,
        band=facts.tenant.band,
        session=facts.session,
        user=facts.user,
        endpoint=facts.endpoint,
        max_wait_ns=left(facts.max_wait_ns),
        first_token_ns=0 if request.has_begun else left(facts.first_token_ns),
        context_tokens=facts.context_tokens,
        needs=tuple(sorted(facts.needs)),
        trace=trace,
    )
