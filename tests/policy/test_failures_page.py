"""docs/failures.md as it stands: its worked examples run, its configurations are accepted and mean what it
says.

Its example of a fallback is served in tests/cli/test_fallback.py.
"""

import doctest
import re
from collections import Counter

import pages
import yaml

from penstock.config.checks import check
from penstock.config.load import convert_config
from penstock.config.tree import Config
from penstock.fleet.members import terms_of
from penstock.policy.flow import Outcome, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

BLOCKS = [
    raw
    for block in re.findall(r"```yaml\n(.*?)```", pages.text_of("failures"), re.DOTALL)
    if "models" in (raw := yaml.safe_load(block))
]


def config_of(raw: dict[str, object]) -> Config:
    config = convert_config(raw | {"auth": {"keys": ["k" * 16]}})
    assert isinstance(config, Config)
    return config


def test_the_examples_do_what_the_page_says() -> None:
    page = pages.DOCS / "failures.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted > 20
    assert not failed


def test_its_configurations_are_accepted() -> None:
    fallback, _ = map(config_of, BLOCKS)
    check(fallback)
    assert [(each.model, each.fallback) for each in fallback.routing.models] == [("big", "mini")]


def test_several_deployments_go_by_order_limits_and_weights() -> None:
    """Ours first, then the cheap one for as many requests as it may have, then the others three to one."""
    _, config = map(config_of, BLOCKS)
    (model,) = config.models
    cheap, three, one = model.workers
    control = FlowControl(QueueTerms(worker_credit=0, extra_per_row=0, headroom=0.0))
    control.set_worker(0, "chat", WorkerId("ours"), WorkerView(max_running=2))
    for each in model.workers:
        view = WorkerView(max_running=1000, is_external=True, terms=terms_of(each))
        control.set_worker(0, "chat", WorkerId(each.url), view)

    def start(number: int) -> str:
        facts = RequestFacts(id=RequestId(f"r{number}"), route="chat", prompt_tokens=20, max_tokens=10)
        control.arrive(0, facts)
        (action,) = control.dispatch(0)
        assert isinstance(action, Start)
        return action.worker_id

    found = [start(number) for number in range(2 + cheap.rpm + 80)]
    assert found[:2] == ["ours"] * 2
    assert found[2 : 2 + cheap.rpm] == [cheap.url] * cheap.rpm, "six hundred a minute"
    assert Counter(found[2 + cheap.rpm :]) == {three.url: 60, one.url: 20}
    control.first_output(0, RequestId("r0"))
    control.ended(0, RequestId("r0"), Outcome.FINISHED, Usage(prompt_tokens=20, completion_tokens=1))
    assert start(len(found)) == "ours", "as soon as it has room"
