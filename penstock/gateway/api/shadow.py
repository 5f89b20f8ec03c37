"""Shadow traffic: hands a copy of an accepted request to the version that a rollout tries
(gateway/dispatch/trials.py), made by that version's own template and tokenizer.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.backends.base import GenerateRequest
from penstock.gateway.api.job import Hints, Job, requests_of
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Served
from penstock.gateway.models.served import ServedModel
from penstock.policy.flow import RequestFacts
from penstock.policy.rollout.dealing import Assigned
from penstock.policy.tenant import may_use_model

Prepare = Callable[[ServedModel, str], Awaitable[tuple[Job, Any]]]


def copy_of(
    services: Services, job: Job, facts: RequestFacts, served: Served, make: tuple[Hints, Prepare]
) -> None:
    """Copy a request that was just accepted, if its conversation is in a rollout's shadow. One that asks for
    several answers, or for none, is not copied, nor is a tenant's that may not use the version.
    """
    assigned, (hints, prepare) = served.assigned, make
    if not isinstance(assigned, Assigned) or not assigned.candidate or served.downgrade is not None:
        return
    if not services.models.takes(assigned.candidate):
        return  # The server that decides has a version that this one does not have yet.
    candidate = services.models.get(assigned.candidate)
    if job.num_choices != 1 or job.only_scores or not may_use_model(facts.tenant, candidate.name):
        return

    if services.tokenize.num_waiting:  # Copies are to spare there, too.
        services.metrics.shadowed(assigned.candidate, "no_room")
        return

    async def copy() -> tuple[GenerateRequest, frozenset[str]]:
        copied, _ = await prepare(candidate, "")
        (request,) = requests_of(copied, hints, 1)
        return request, copied.needs

    services.trials.copy(job.exchange, assigned, facts, copy)
