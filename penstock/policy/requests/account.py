"""What is held for a request while it lives: tokens of its tenant's limits, and money of its budget, slice by
slice.

Knows limits, budgets and prices as `parts` names them, and nothing of queues and workers.
"""

from typing import cast

from penstock.errors import PenstockError
from penstock.policy.answers import Refused
from penstock.policy.contracts import MoneyHold, Policies, Refusal, TokenHold
from penstock.policy.flow import RequestFacts
from penstock.types import Usage


class Holds:
    """What one request holds."""

    __slots__ = ("budgeted", "expected", "money", "tokens")

    def __init__(self, tokens: TokenHold, money: MoneyHold, *, expected: int, budgeted: int) -> None:
        self.tokens, self.money = tokens, money
        self.expected = expected
        """Answer tokens that its fair share was charged for."""
        self.budgeted = budgeted
        """Answer tokens that the budget holds money for."""

    def undo(self, now_ns: int) -> None:
        """It was refused after all."""
        self.tokens.undo(now_ns)
        self.money.undo(now_ns)


class Accounts:
    """Opens, grows and settles them."""

    __slots__ = ("_policies",)

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def open(self, now_ns: int, facts: RequestFacts) -> Holds | Refused:
        """Hold what a request is expected to need, or nothing."""
        policies, tenant = self._policies, facts.tenant
        longest = facts.max_tokens * facts.choices
        expected = facts.choices * policies.lengths.expect(tenant.id, facts.route, facts.max_tokens)
        held = policies.limits.reserve(now_ns, tenant, facts.prompt_tokens, expected, request_id=facts.id)
        if (error := _error_of(held)) is not None:
            return Refused(facts.id, "limits", error)
        tokens = cast("TokenHold", held)
        budgeted = min(policies.slice_tokens, longest)
        price = self._price(facts.route, facts.prompt_tokens, facts.cached_tokens, budgeted)
        reserved = policies.budgets.reserve(now_ns, tenant, price)
        if (error := _error_of(reserved)) is not None:
            tokens.undo(now_ns)
            return Refused(facts.id, "budget", error)
        money = cast("MoneyHold", reserved)
        return Holds(tokens, money, expected=expected, budgeted=budgeted)

    def next_slice(
        self, now_ns: int, facts: RequestFacts, holds: Holds, total: int, cached_tokens: int
    ) -> bool:
        """Hold money for the slice that begins after `total` answer tokens; False: there is none left."""
        longest = facts.max_tokens * facts.choices
        holds.budgeted = min(total + self._policies.slice_tokens, max(total, longest))
        price = self._price(facts.route, facts.prompt_tokens, max(cached_tokens, 0), holds.budgeted)
        return holds.money.renew(now_ns, price)

    def settle(self, now_ns: int, route: str, holds: Holds, used: Usage) -> int:
        """It used so much; returns its price in millionths."""
        tokens = used.prompt_tokens + used.completion_tokens
        holds.tokens.settle(now_ns, tokens)
        price = self._policies.prices.cost_micros(route, used) if tokens else 0
        holds.money.settle(now_ns, price)
        return price

    def _price(self, route: str, prompt: int, cached: int, output: int) -> int:
        usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)
        return self._policies.prices.cost_micros(route, usage)


def _error_of(answer: object) -> PenstockError | None:
    """The error of a refusal; None of anything else."""
    return cast("Refusal", answer).error() if hasattr(answer, "error") else None
