"""docs/overload.md as it stands: configuration and tables.

Its examples of order are run in tests/gateway/test_bands.py, those of admission in
tests/gateway/test_admission.py.
"""

import re

import pages

from penstock.clock import NS_PER_MS
from penstock.errors import WorkerUnavailable
from penstock.policy.admission import admit
from penstock.policy.admission.admit import AdmissionControl, Promises
from penstock.policy.contracts import ModelFacts, Pass, RouteLoad
from penstock.policy.flow import Diverted, Refused, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.tenant import Tenant
from penstock.policy.terms import QueueTerms, band_terms
from penstock.types import RequestId, TenantId, WorkerId

PAGE = pages.text_of("overload")
(CONFIG,) = pages.configs("overload", "large", "medium", "small")


def test_the_bands_are_as_the_table_says() -> None:
    rows = pages.table("overload", "band")
    assert [row[0] for row in rows] == [band.name for band in QueueTerms().bands]
    for band, (_, order, floor, starvation, waiting, wait) in zip(
        map(band_terms, QueueTerms().bands), rows, strict=True
    ):
        assert int(order) == band.order
        number = floor.split()[0]
        assert band.floor == (int(number.rstrip("%")) / 100 if "%" in number else int(number))
        assert starvation == f"{band.starvation_s:g} s"
        assert pages.number(waiting) == band.requests_max
        assert wait == f"{band.timeout_s:g} s"


def test_every_number_in_the_prose_is_the_default_of_its_setting() -> None:
    constants = {name.lower(): value for part in (admit, admit) for name, value in vars(part).items()}
    reported = re.findall(r"`(\w+)` \((\d+(?:\.\d+)?)(%| %)?\)", PAGE)
    assert len(reported) >= 8
    for name, value, percent in reported:
        default = getattr(QueueTerms(), name, constants.get(name))
        assert default == float(value) / (100 if percent else 1), name
    queue = QueueTerms()
    assert f"more than {queue.shed_kv_above:.0%} full" in PAGE
    assert f"until {queue.shed_kv_to:.0%}" in PAGE


def started(control: FlowControl, tenant: str, count: int) -> int:
    """So many requests of a tenant come: how many start at once."""
    for number in range(count):
        facts = RequestFacts(
            id=RequestId(f"{tenant}-{number}"), route="m", tenant=Tenant(id=TenantId(tenant)),
            prompt_tokens=20, max_tokens=2000,
        )  # fmt: skip
        assert not isinstance(control.arrive(0, facts), Refused)
    return sum(isinstance(action, Start) for action in control.dispatch(0))


def test_rows_that_are_kept_free_of_external_workers_are_as_the_table_says() -> None:
    rows = pages.table("overload", "`max_running`")
    assert len(rows) == 4
    for said, own, kept, bound in rows:
        max_running = 0 if said == "left out" else pages.number(said)
        control = FlowControl(QueueTerms())
        view = WorkerView(max_running=max_running, is_external=True)
        control.set_worker(0, "m", WorkerId("w"), view)
        assert started(control, "flood", 2 * pages.number(own)) == pages.number(own)
        others = [started(control, f"t{number}", 2) for number in range(pages.number(kept.split()[0]) + 1)]
        assert others == [1] * (len(others) - 1) + [0], "as many tenants as rows are kept free"
        assert pages.number(own) + sum(others) == pages.number(bound)


def test_the_table_of_targets_is_read_from_the_page() -> None:
    admission = CONFIG.admission
    assert admission.ttft_target_ms == 5000
    assert {(each.tier, each.band): (each.ttft_ms, each.tpot_ms) for each in admission.targets} == {
        ("pro", ""): (2000, 30),
        ("", "bulk"): (0, None),
    }
    assert Promises(admission).of(tier="pro", band="bulk").tpot_ns == 30 * NS_PER_MS
    assert Promises(admission).of(tier="free", band="bulk").tpot_ns == 50 * NS_PER_MS


def decide(model: str, *gone: str) -> Pass | Diverted | Refused:
    made = AdmissionControl(
        CONFIG.admission, CONFIG.routing, QueueTerms(no_worker_wait_s=0), lambda _: ModelFacts()
    )
    facts = RequestFacts(id=RequestId("r"), route=model, prompt_tokens=1, max_tokens=1)
    return made.decide(0, facts, lambda name: RouteLoad(name, int(name not in gone), 0, is_full=False))


def test_the_chain_of_models_and_what_they_may_be_trusted_with() -> None:
    assert isinstance(decide("large"), Pass)
    assert decide("large", "large") == Diverted(RequestId("r"), "medium", "unavailable")
    small = decide("large", "large", "medium")
    assert isinstance(small, Refused), 'small is not marked "eu"'
    assert isinstance(small.error, WorkerUnavailable)
