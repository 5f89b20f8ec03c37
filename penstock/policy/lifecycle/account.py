"""What is held for a request while it lives: tokens of its tenant's limits, and money of its budget, slice by slice.

Knows limits, budgets and prices as `parts` names them, and nothing of queues and workers.
"""

from typing import cast

from penstock.errors import PenstockError
from penstock.policy.answers import Refused
from penstock.policy.flow import Arrival, Flow
from penstock.policy.parts import MoneyHold, Parts, Refusal, TokenHold
from penstock.types import Usage


class Account:
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

    __slots__ = ("_parts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def open(self, now_ns: int, arrival: Arrival) -> Account | Refused:
        """Hold what a request is expected to need, or nothing."""
        parts, tenant = self._parts, arrival.tenant
        longest = arrival.max_tokens * arrival.choices
        expected = arrival.choices * parts.lengths.expect(tenant.id, arrival.route, arrival.max_tokens)
        held = parts.limits.reserve(now_ns, tenant, arrival.prompt_tokens, expected, request_id=arrival.id)
        if (error := _error_of(held)) is not None:
            return Refused(arrival.id, "limits", error)
        tokens = cast("TokenHold", held)
        budgeted = min(parts.slice_tokens, longest)
        price = self._price(arrival.route, arrival.prompt_tokens, arrival.cached_tokens, budgeted)
        reserved = parts.budgets.reserve(now_ns, tenant, price)
        if (error := _error_of(reserved)) is not None:
            tokens.undo(now_ns)
            return Refused(arrival.id, "budget", error)
        money = cast("MoneyHold", reserved)
        return Account(tokens, money, expected=expected, budgeted=budgeted)

    def next_slice(self, now_ns: int, account: Account, flow: Flow, total: int) -> bool:
        """Hold money for the slice that begins after `total` answer tokens; False: there is none left."""
        arrival = flow.arrival
        longest = arrival.max_tokens * arrival.choices
        account.budgeted = min(total + self._parts.slice_tokens, max(total, longest))
        cached = max(flow.cached_tokens, 0)
        price = self._price(arrival.route, arrival.prompt_tokens, cached, account.budgeted)
        return account.money.renew(now_ns, price)

    def settle(self, now_ns: int, account: Account, flow: Flow) -> None:
        """It used what its flow says, which gets its price."""
        used = flow.prompt_tokens + flow.completion_tokens
        account.tokens.settle(now_ns, used)
        price = 0
        if used:
            price = self._price(
                flow.arrival.route, flow.prompt_tokens, flow.cached_tokens, flow.completion_tokens
            )
        flow.cost_micros = price
        account.money.settle(now_ns, price)

    def _price(self, route: str, prompt: int, cached: int, output: int) -> int:
        usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)
        return self._parts.prices.cost_micros(route, usage)


def _error_of(answer: object) -> PenstockError | None:
    """The error of a refusal; None of anything else."""
    return cast("Refusal", answer).error() if hasattr(answer, "error") else None
