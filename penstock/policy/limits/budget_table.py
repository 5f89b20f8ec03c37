"""The store's side of shared budgets: what each process has spent and each gateway holds
(policy/limits/budget_lease.py).
"""

from collections.abc import Container

from penstock.clock import NS_PER_S, NS_PER_US
from penstock.policy.limits.lease_messages import BudgetAsk, LeaseGrant

_COLLECT_MIN = 1024


class _Budget:
    """One day or month of one tenant."""

    __slots__ = ("answers", "epoch", "forget_ns", "held", "spent", "total")

    def __init__(self, epoch: int) -> None:
        self.epoch, self.total, self.forget_ns = epoch, 0, 0
        self.spent: dict[str, int] = {}
        """By process."""
        self.held: dict[str, int] = {}
        """By gateway."""
        self.answers: dict[str, tuple[int, int]] = {}
        """The last question's number and grant, by gateway."""

    def count(self, process: str, spent: int) -> None:
        """A process has spent so much in all; less than is known is old news."""
        more = spent - self.spent.get(process, 0)
        if more > 0:
            self.spent[process] = spent
            self.total += more

    def forget(self, alive: Container[str]) -> None:
        """What a gateway held that is gone is free again."""
        assert self.held.keys() == self.answers.keys(), "what is held was answered"
        for gone in [gateway for gateway in self.held if gateway not in alive]:
            del self.held[gone], self.answers[gone]


class BudgetTable:
    """All shared budgets."""

    __slots__ = ("_budgets", "_collect_at")

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}
        self._collect_at = _COLLECT_MIN

    def grant(
        self, now_ns: int, gateway: str, ask: BudgetAsk, alive: Container[str], epoch: int
    ) -> LeaseGrant:
        """Answer one question; `alive` are the gateways that count, and `epoch` is the number of a budget
        that is new.
        """
        budget = self._of(now_ns, ask.key, epoch)
        budget.forget_ns = now_ns + ask.kept_s * NS_PER_S
        budget.forget(alive)
        seq, granted = budget.answers.get(gateway, (-1, 0))
        if ask.seq > seq:  # Else it is asked again, or a copy of it that was on its way for long.
            for process, spent in ((ask.process, ask.spent), *ask.past):
                budget.count(process, spent)
            budget.held[gateway] = ask.held
            left = _left(ask.limit, budget)
            granted = max(0, min(ask.want, left)) if left >= ask.least else 0
            budget.held[gateway] += granted
            budget.answers[gateway] = (ask.seq, granted)
            assert not granted or _left(ask.limit, budget) >= 0, "a grant is never on credit"
        return LeaseGrant(
            granted=granted,
            level=_left(ask.limit, budget),
            epoch=budget.epoch,
            at_us=now_ns // NS_PER_US,
            spent=budget.total,
        )

    def __len__(self) -> int:
        return len(self._budgets)

    def _of(self, now_ns: int, key: str, epoch: int) -> _Budget:
        assert epoch > 0, "0 is no life"
        budget = self._budgets.get(key)
        if budget is None:
            if len(self._budgets) >= self._collect_at:
                for old in [old for old, each in self._budgets.items() if each.forget_ns < now_ns]:
                    del self._budgets[old]
                self._collect_at = max(_COLLECT_MIN, 2 * len(self._budgets))
            budget = self._budgets[key] = _Budget(epoch)
        return budget


def _left(limit: int, budget: _Budget) -> int:
    return limit - budget.total - sum(budget.held.values())
