"""Tenants whose budget nears its end are sent to cheaper models, where they allow that, so that it lasts longer."""

from collections.abc import Callable

from penstock.policy.flow import Arrival
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.types import Usage

_CHOSEN = ("", "complexity")
"""A request that was sent on for another reason stays where that put it."""


class Thrift:
    """Knows the budgets and the prices."""

    __slots__ = ("_budgets", "_prices")

    def __init__(self, budgets: TenantBudgets, prices: PriceList) -> None:
        self._budgets, self._prices = budgets, prices

    def cheaper_for(self, now_ns: int, arrival: Arrival) -> Callable[[str], bool] | None:
        """Whether another model would cost less for this request, at its longest; None if its tenant need not save."""
        tenant = arrival.tenant
        if not (tenant.budget_day_micros or tenant.budget_month_micros) or arrival.diverted not in _CHOSEN:
            return None
        if not self._budgets.nears_end(now_ns, tenant):
            return None
        usage = Usage(
            prompt_tokens=arrival.prompt_tokens, completion_tokens=arrival.max_tokens * arrival.choices
        )
        cost_max = self._prices.cost_micros(arrival.route, usage)
        return lambda model: self._prices.cost_micros(model, usage) < cost_max
