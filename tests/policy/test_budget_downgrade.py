"""Tenants whose budget nears its end go to a cheaper fallback, where they allow that."""

import pytest

from penstock.config.ledger import BudgetsConfig, ModelPrice, PricesConfig
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig
from penstock.policy.admission.admit import AdmissionControl
from penstock.policy.admission.downgrade import BudgetDowngrade
from penstock.policy.contracts import ModelFacts
from penstock.policy.flow import Diverted, Queued, Refused, RequestFacts
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.limits.budget import Spent, TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.tenant import Tenant
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, TenantId, WorkerId

MICROS = 1_000_000
PRICES = PricesConfig(
    models=(
        ModelPrice(model="large", input=10, output=30),
        ModelPrice(model="odd", input=20, output=60),
        ModelPrice(model="small", input=1, output=3),
    )
)
ROUTES = (
    ModelRoute(model="large", fallback="odd"),
    ModelRoute(model="odd", fallback="small"),
    ModelRoute(model="small", tools=False),
)
DAY = Tenant(id=TenantId("acme"), budget_day_micros=MICROS)


class Rig:
    """Flow control with budgets, and one free worker for each model.

    `spent_micros`: of tenant acme, today.
    """

    def __init__(self, spent_micros: int = 0, *, month_micros: int | None = None, **config: object) -> None:
        budgets, prices = TenantBudgets(BudgetsConfig(**config), wall_offset_ns=0), PriceList(PRICES)
        month = spent_micros if month_micros is None else month_micros
        budgets.restore(
            0,
            [Spent(tenant=TenantId("acme"), process="p", day=0, day_micros=spent_micros, month_micros=month)],
        )
        facts = {name: ModelFacts(max_model_len=4096) for name in ("large", "odd", "small")}
        queue = QueueTerms(worker_credit=0, tenant_share=1.0)
        routing, thrift = RoutingConfig(models=ROUTES), BudgetDowngrade(budgets, prices)
        admission = AdmissionControl(AdmissionConfig(), routing, queue, facts.get, thrift)
        self.flow = FlowControl(queue, Policies(admission=admission, budgets=budgets, prices=prices))
        for name in facts:
            self.flow.set_worker(0, name, WorkerId(name), WorkerView(max_running=1))

    def ask(self, tenant: Tenant = DAY, **facts: object) -> Queued | Diverted | Refused:
        facts = {
            "id": RequestId("r"), "route": "large", "requested_model": "large",
            "prompt_tokens": 100, "max_tokens": 10, **facts,
        }  # fmt: skip
        return self.flow.arrive(0, RequestFacts(tenant=tenant, **facts))


def test_from_a_share_of_the_budget_on_a_cheaper_model_answers() -> None:
    assert isinstance(Rig(799_999).ask(), Queued)
    answer = Rig(800_000).ask()
    assert isinstance(answer, Diverted)
    assert (answer.route, answer.why) == ("small", "budget"), "the fallback that costs more is no help"
    assert isinstance(Rig(800_000, downgrade_at=0.9).ask(), Queued)


def test_the_months_budget_counts_as_well_and_so_does_what_is_reserved() -> None:
    both = Tenant(id=TenantId("acme"), budget_day_micros=MICROS, budget_month_micros=10 * MICROS)
    assert isinstance(Rig(0, month_micros=8 * MICROS).ask(both), Diverted)
    rig = Rig(798_000)
    assert isinstance(
        rig.ask(id=RequestId("first"), prompt_tokens=150), Queued
    )  # Holds 1,500 + 300 for its answer.
    assert isinstance(rig.ask(prompt_tokens=30), Queued)
    assert isinstance(rig.ask(id=RequestId("third")), Diverted)


@pytest.mark.parametrize(
    ("tenant", "facts"),
    [
        (Tenant(id=TenantId("acme")), {}),
        (Tenant(id=TenantId("other"), budget_day_micros=MICROS), {}),
        (DAY, {"degrade": "never"}),
        (Tenant(id=TenantId("acme"), budget_day_micros=MICROS, degrade="never"), {"degrade": "allow"}),
        (Tenant(id=TenantId("acme"), budget_day_micros=MICROS, models=frozenset({"large", "odd"})), {}),
        (DAY, {"needs_tools": True}),
        (DAY, {"adapter": "law"}),
        (DAY, {"route": "small", "requested_model": "small"}),
        (DAY, {"diverted": "slo", "requested_model": "huge"}),
    ],
    ids=["no budget", "not spent", "never", "promised", "not allowed", "tools", "adapter", "cheapest",
        "sent here"],
)  # fmt: skip
def test_who_keeps_the_model(tenant: Tenant, facts: dict[str, object]) -> None:
    assert isinstance(Rig(900_000).ask(tenant, **facts), Queued)


def test_a_choice_of_auto_is_one_that_may_be_changed() -> None:
    answer = Rig(900_000).ask(diverted="complexity", requested_model="auto")
    assert isinstance(answer, Diverted)
    assert answer.why == "budget"


def test_a_cheaper_model_that_is_busy_does_not_help() -> None:
    rig = Rig(900_000)
    rig.flow.set_worker(0, "small", WorkerId("small"), None)
    assert isinstance(rig.ask(), Queued)
