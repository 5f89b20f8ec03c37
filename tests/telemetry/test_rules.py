"""The rules for Prometheus are the alerts that the server evaluates; each has its section in the runbook."""

import re
import subprocess
from pathlib import Path

import pytest
from alert_scenes import all_scenes, promtool_test
from prometheus_programs import ROOT, SHIPPED, program

from penstock.cli.main import main
from penstock.config.tree import SloConfig
from penstock.telemetry.alerting import rules_file, runbook
from penstock.telemetry.alerts import names, rules
from penstock.telemetry.metrics import Metrics


def test_the_shipped_file_is_what_the_code_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "--rules"]) == 0
    text = capsys.readouterr().out
    assert SHIPPED.read_text() == text, "run: penstock alerts --rules > examples/observability/rules.yaml"


def test_objectives_of_a_configuration_are_in_its_rules(tmp_path: Path, capsys) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("slo: {availability: 0.999, ttft: 0.9, tpot: 0.5}")
    assert main(["alerts", "--rules", "-c", str(file)]) == 0
    text = capsys.readouterr().out
    assert "[1h])) > 0.0144)" in text
    assert "[6h])) > 0.6)" in text
    # Half of the answers may be slow: all of them are a burn rate of 2, so only the slowest row is left.
    assert text.count("alert: TpotBurn") == 1
    assert text.count("alert: TtftBurn") == 3, "90 % cannot burn 14.4 or 10 times too fast"


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == names(rules(SloConfig()))
    anchors = {runbook(heading) for heading in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    assert {runbook(rule.name) for rule in rules(SloConfig())} == anchors


def played(scenes, tmp_path: Path) -> None:
    """Let promtool play them before the rules."""
    (tmp_path / "rules.yaml").write_text(rules_file(rules(SloConfig())))
    minutes = max(scene.step for scene in scenes)
    head = f"rule_files: [rules.yaml]\nevaluation_interval: {minutes}m\ntests:\n"
    (tmp_path / "tests.yaml").write_text(head + "".join(map(promtool_test, scenes)))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(tmp_path / "tests.yaml")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_shipped_rules() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(SHIPPED)], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_our_metrics() -> None:
    metrics = Metrics(["m"], version="1")
    metrics.model("m").engine_stats({"m-0": None})
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(command, check=False, capture_output=True, input=metrics.render())
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.prometheus
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", sorted({scene.step for scene in all_scenes()}))
def test_prometheus_finds_what_the_server_finds(tmp_path: Path, step: int) -> None:
    played([scene for scene in all_scenes() if scene.step == step], tmp_path)
