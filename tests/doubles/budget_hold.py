"""What one request holds of a tenant's budget, as a request in its life does (policy/request.py)."""

from penstock.policy.limits.budget import BudgetRefusal, TenantBudgets
from penstock.policy.tenant import Tenant


class BudgetHold:
    """Made by `hold`; `settle` or `undo` it once."""

    def __init__(self, budgets: TenantBudgets, tenant: Tenant, micros: int) -> None:
        self._budgets, self._tenant, self.reserved = budgets, tenant.id, micros

    def renew(self, now_ns: int, total: int) -> bool:
        """For the next slice; False: it must stop."""
        renewed = self._budgets.renew(now_ns, self._tenant, self.reserved, total)
        if renewed:
            self.reserved = max(self.reserved, total)
        return renewed

    def settle(self, now_ns: int, actual: int) -> None:
        """It cost so much."""
        self._budgets.settle(now_ns, self._tenant, self.reserved, actual)

    def undo(self, now_ns: int) -> None:
        """It was refused after all."""
        self.settle(now_ns, 0)


def hold(budgets: TenantBudgets, now_ns: int, tenant: Tenant, micros: int) -> BudgetHold | BudgetRefusal:
    """Reserve so much."""
    return budgets.reserve(now_ns, tenant, micros) or BudgetHold(budgets, tenant, micros)
