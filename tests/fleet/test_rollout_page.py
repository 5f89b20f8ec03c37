"""docs/rollout.md as it stands: its configurations are accepted, its commands are commands, and its table has
the metrics that are compared, with their margins.
"""

import re
import shlex

import msgspec
import pages

from penstock.cli.main import build_parser
from penstock.config.checkpoints import resolve
from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.fleet.rollouts import ProbeScore
from penstock.policy.rollout.evidence import Evidence, RolloutMetric

PAGE = pages.text_of("rollout")


def test_its_configurations_have_two_versions_of_one_model() -> None:
    models, settings = pages.configs("rollout")
    for config in (models, settings):
        assert [(each.name, each.version) for each in config.models] == [("support", 1), ("support", 2)]
    first, second = settings.models
    assert first.path == second.path
    assert first.engine != second.engine, "a configuration as a version"


def test_its_example_for_one_machine_has_the_versions_that_it_rolls_out() -> None:
    config = parse_config((pages.DOCS.parent / "examples" / "rollout" / "penstock.yaml").read_text())
    check(config)
    assert [(each.name, each.version) for each in config.models] == [("river", 1), ("river", 2)]
    for model in config.models:
        assert resolve(model.path).is_dir(), "a fresh clone has it"


def test_its_commands_are_commands() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks[:3]:
        for line in block.splitlines():
            argv = shlex.split(line.removesuffix("&"), comments=True)
            assert argv[0] == "penstock"
            build_parser().parse_args(argv[1:])
    (body,) = re.findall(r"-d '(\{.*?\})'", PAGE)
    score = msgspec.json.decode(body, type=ProbeScore)
    assert (score.version, score.score) == ("support@2", 1.0)


def test_its_table_has_every_metric_and_what_is_worse() -> None:
    rows = {row[0]: row[2] for row in pages.table("rollout", "metric")}
    short = {RolloutMetric.PREFILL: "prefill"}
    evidence = Evidence()
    for metric in RolloutMetric:
        worse = rows.pop(short.get(metric, metric.value))
        margin = f"{100 * evidence.read(metric).margin:.3g} "
        assert margin in f"{worse} ", (metric, worse)
    assert not rows
