"""Every alert fires when it should and is quiet when it should, on virtual time."""

import pytest
from alert_scenes import DUE, NONE, SERIES, Scene, all_scenes, at, grown, length
from alert_scenes import TARGETS as SCENE_TARGETS

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.tree import SloConfig
from penstock.telemetry.alerting import Alerts
from penstock.telemetry.alerts import names, rules, targets
from penstock.telemetry.counts import Counts, Series
from penstock.telemetry.history import SLO_S, History
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.pages import merged

M = Series(SERIES["model"], SERIES["band"])
SCENES = all_scenes()


class Play:
    """A scene before the server's evaluation."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.clock = ManualClock(wall_ns=1_700_000_040 * NS_PER_S)
        self.history = History(self.clock)
        self.alerts = Alerts(SloConfig(), self.history, self.clock)
        self.minute = 0

    def page(self) -> bytes:
        lines = [f"{name} {at(spans, max(0, self.minute - 1))}" for name, spans in self.scene.gauges.items()]
        lines += [f"{name} {grown(spans, self.minute)}" for name, spans in self.scene.counters.items()]
        return "\n".join(lines).encode()

    def run(self, until: int) -> set[tuple[str, str, str]]:
        """Until the end of this minute; the alerts that fire then."""
        step, scene = self.scene.step, self.scene
        while self.minute < until:
            counts = Counts()
            for objective, spans in scene.requests.items():
                due = round(at([(minutes, each) for minutes, each, _ in spans], self.minute)) * step
                missed = round(at([(minutes, each) for minutes, _, each in spans], self.minute)) * step
                count(counts, objective, due, missed)
            self.history.add([(M, counts)])
            self.minute += step
            # Whatever watches the metrics sees every minute; what only counts is looked at in the end.
            if scene.gauges or scene.counters or self.minute >= until:
                self.clock.advance(59 * NS_PER_S)
                self.alerts.evaluate(self.page())
                self.clock.advance((step * 60 - 59) * NS_PER_S)
            else:
                self.clock.advance(step * 60 * NS_PER_S)
        name, burn = scene.only
        return {
            (alert.name, alert.severity, alert.labels.get("burn", ""))
            for alert in self.alerts.report().firing
            if not name or (name, burn) == (alert.name, alert.labels.get("burn"))
        }


def count(counts: Counts, objective: str, due: int, missed: int) -> None:
    if objective == "availability":
        counts.outcomes = {"stop": due - missed, "error": missed}
    elif objective == "tpot":
        counts.tpot_due, counts.tpot_late = due, missed
    else:
        counts.ttft_due = due
        if objective == "ttft":
            counts.ttft_late = missed
        else:
            counts.ttft_far = missed


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_what_fires_and_what_does_not(scene):
    play = Play(scene)
    found = {minute: play.run(minute) for minute in sorted(scene.fires)}
    assert found == {minute: set(expected) for minute, expected in scene.fires.items()}


def test_every_alert_has_a_scene_that_fires_it_and_one_that_ends_it():
    rows = {(rule.name, rule.severity, dict(rule.labels).get("burn", "")) for rule in rules(SloConfig())}
    fired = {each for scene in SCENES for expected in scene.fires.values() for each in expected}
    assert rows == fired
    for scene in SCENES:
        assert any(expected == NONE for expected in scene.fires.values()), scene.name
    assert targets(SloConfig()) == SCENE_TARGETS
    assert all(rule.tests[0].left for rule in rules(SloConfig()))
    assert max(length(scene) for scene in SCENES) * 60 > SLO_S
    assert DUE.startswith("penstock_")


def test_an_alert_says_what_it_is_about_and_when_it_is_over():
    scene = next(each for each in SCENES if each.name == "a worker's process ends")
    play = Play(scene)
    play.run(23)
    (alert,) = play.alerts.report().firing
    assert (alert.name, alert.severity, alert.labels) == ("WorkerCrashed", "page", {"model": "m"})
    assert alert.why == "1 restarts in 10m"
    assert alert.runbook == "docs/runbook.md#workercrashed"
    play.run(40)
    report = play.alerts.report()
    assert report.firing == []
    assert [(each.name, each.since) for each in report.ended] == [("WorkerCrashed", alert.since)]
    assert report.ended[0].ended > alert.since


@pytest.mark.parametrize(
    ("kind", "name"), [("xid", "DeviceLost"), ("oom_kill", "OomKill"), ("weights", "WeightsDamaged")]
)
def test_the_first_fault_of_a_machine_fires_and_counts_once_however_many_processes_see_it(kind, name):
    clock = ManualClock(wall_ns=1_700_000_040 * NS_PER_S)
    alerts = Alerts(SloConfig(), History(clock), clock)
    pages = [Metrics(["m"], version="1") for _ in range(2)]
    meters = [each.anomalies() for each in pages]

    def evaluate(*gateways: Metrics) -> list[str]:
        for each in meters:
            each.workers([("m", "m-0", None, 1.0)])
        clock.advance(15 * NS_PER_S)
        page = merged([each.render() for each in gateways])
        return [f"{each.name}: {each.why}" for each in alerts.evaluate(page)]

    assert evaluate(*pages) == []
    meters[0].fault("m", kind)
    meters[1].fault("m", kind)
    assert evaluate(*pages) == [f"{name}: 1 in 10m"]
    meters[0].fault("m", kind)
    assert evaluate(*pages) == []
    assert evaluate(pages[1]) == [], "one process ends"
    assert alerts.report().firing[0].why == "2 in 10m"


def test_burn_rates_are_told_by_objective():
    clock = ManualClock(wall_ns=1_700_000_040 * NS_PER_S)
    history = History(clock)
    alerts = Alerts(SloConfig(availability=0.9), history, clock)
    history.add([(M, Counts(outcomes={"stop": 50, "shed": 50, "limited": 900, "abort": 3}))])
    (begun,) = (each for each in alerts.evaluate(b"") if each.labels["burn"] == "3")
    assert begun.labels == {"model": "m", "band": "default", "burn": "3", "window": "1d"}
    assert (
        begun.why
        == "50.0% of requests failed in 1d, limit 30.0%; 50.0% of requests failed in 2h, limit 30.0%"
    )
    row = next(each for each in alerts.report().slo if each.objective == "availability")
    assert {(each.window, each.total, each.bad, each.burn) for each in row.windows} == {
        (window, 100, 50, 5.0) for window in ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
    }
    assert len({each.name for each in begun_names(alerts)}) == len(names(alerts.rules))


def begun_names(alerts: Alerts):
    return alerts.rules
