"""Sends tenants whose budget nears its end to cheaper models, where they allow that: so it lasts longer."""

from collections.abc import Callable

from penstock.policy.flow import RequestFacts
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.types import Usage

_CHOSEN = ("", "complexity")
"""A request that was sent on for another reason stays where that put it."""


class BudgetDowngrade:
    """Knows the budgets and the prices."""

    __slots__ = ("_budgets", "_prices")

    def __init__(self, budgets: TenantBudgets, prices: PriceList) -> None:
        self._budgets, self._prices = budgets, prices

    def cheaper_for(self, now_ns: int, facts: RequestFacts) -> Callable[[str], bool] | None:
        """Whether another model would cost less for this request, at its longest; None if its tenant need not
        save.
        """
        tenant = facts.tenant
        if not tenant.has_budget or facts.diverted not in _CHOSEN:
            return None
        if not self._budgets.nears_end(now_ns, tenant):
            return None
        usage = Usage(prompt_tokens=facts.prompt_tokens, completion_tokens=facts.max_tokens * facts.choices)
        cost_max = self._prices.cost_micros(facts.route, usage)
        return lambda model: self._prices.cost_micros(model, usage) < cost_max
