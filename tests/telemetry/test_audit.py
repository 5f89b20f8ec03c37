"""The audit trail: what it keeps, over restarts and beside others, and who it says did what."""

import io

import pytest

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import Config, LogConfig
from penstock.policy.lifecycle.machine_costs import Costs
from penstock.telemetry import audit
from penstock.telemetry.audit import Audit, Notes
from penstock.telemetry.costs import CostDays
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.watch import Watch


@pytest.fixture
def clock():
    return ManualClock(wall_ns=1_700_000_000 * NS_PER_S)


@pytest.fixture
def make(clock, tmp_path):
    """A server's trail and what notes for it, after its start; all share a directory."""

    def made(path=tmp_path / "history" / "audit.jsonl"):
        trail = Audit(path, Log(LogConfig(), clock, stream=made.log))
        trail.load()
        return trail, Notes(clock, trail.keep)

    made.log = io.StringIO()
    return made


def said(trail, **query):
    return [(event.kind, event.what, event.about) for event in trail.report(**query).events]


def test_what_was_noted_is_there_after_a_restart_newest_first(make, clock, tmp_path):
    trail, notes = make()
    notes.note("admin", "drained", "m-0", by="sk-abc")
    clock.advance(NS_PER_S)
    notes.note("worker", "left", "m-0", why="model m")
    assert trail.has_changes
    trail.write()
    assert not trail.has_changes
    again, notes = make()
    notes.note("admin", "brought back", "m-0", by="sk-abc")
    assert said(again) == [
        ("admin", "brought back", "m-0"), ("worker", "left", "m-0"), ("admin", "drained", "m-0"),
    ]  # fmt: skip
    newest, left, drained = again.report().events
    assert (drained.by, left.why, left.at_ms - drained.at_ms) == ("sk-abc", "model m", 1000)
    assert newest.number > left.number > drained.number
    assert said(again, kind="worker") == [("worker", "left", "m-0")]
    assert said(again, before=newest.number, limit=1) == [("worker", "left", "m-0")]
    (file,) = (tmp_path / "history").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_workers_that_come_and_go_do_not_push_out_who_revoked_a_key(make, monkeypatch):
    monkeypatch.setattr(audit, "KIND_EVENTS_MAX", 5)
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 2000)
    trail, notes = make()
    notes.note("admin", "key revoked", "sk-abc", by="sk-boss")
    for i in range(40):
        notes.note("worker", "left", f"m-{i}")
        trail.write()
    wanted = [*(("worker", "left", f"m-{i}") for i in range(39, 34, -1)), ("admin", "key revoked", "sk-abc")]
    assert said(trail) == said(make()[0]) == wanted


def test_two_servers_append_to_one_file_and_damaged_lines_are_left_out(make, tmp_path):
    (one, note_one), (other, note_other) = make(), make()
    for i in range(3):
        note_one.note("config", "one", str(i))
        note_other.note("config", "other", str(i))
        one.write()
        other.write()
    path = tmp_path / "history" / "audit.jsonl"
    with path.open("a") as file:
        file.write('{"at_ms": 1, "ki')
    note_one.note("config", "one", "3")
    one.write()
    found = said(make()[0])
    assert sorted(found) == sorted([("config", name, str(i)) for name in ("one", "other") for i in range(3)]
                                   + [("config", "one", "3")])  # fmt: skip
    assert "lines=1" in make.log.getvalue()


def test_what_several_processes_see_of_a_worker_is_one_event_and_long_text_is_cut(make, clock):
    trail, notes = make(path=None)
    for _ in range(3):
        notes.note("worker", "is left alone", "m-0", why="it fails")
        notes.note("admin", "drained", "m-0")
    clock.advance(60 * NS_PER_S)
    notes.note("worker", "is left alone", "m-0", why="x" * 10_000)
    assert [event.kind for event in trail.report().events] == ["worker", "admin", "admin", "admin", "worker"]
    assert len(trail.report().events[0].why) == audit.TEXT_CHARS_MAX
    trail.write()
    before = trail.report().total
    for _ in range(2):
        for i in range(40):
            notes.note("worker", "left", f"m-{i}")
    assert trail.report().total == before + 40, "all workers of a machine are lost at the same time"


def test_a_trail_that_cannot_be_read_begins_empty(make, clock, tmp_path):
    path = tmp_path / "history" / "audit.jsonl"
    path.mkdir(parents=True)
    trail, notes = make()
    notes.note("server", "started")
    assert said(trail) == [("server", "started", "")]
    assert "the audit trail cannot be read; it begins empty" in make.log.getvalue()


def test_costs_that_cannot_be_written_are_said_once(clock, tmp_path):
    (tmp_path / "costs").write_text("a file where the directory should be")
    log, costs = io.StringIO(), CostDays(tmp_path / "costs", clock, keep_days=0)
    config = Config(ledger=LedgerConfig(directory=str(tmp_path)))
    metrics = Metrics(["m"], version="1")
    metrics.accelerator_costs({"m": Costs(idle=1)})
    watch = Watch(config, clock, Log(LogConfig(), clock, stream=log), metrics.render)
    costs.take(metrics.render())
    for _ in range(2):
        watch._write_costs(costs)
    assert log.getvalue().count("what the machines cost cannot be written down") == 1


def test_a_disk_that_takes_nothing_is_said_once(make, tmp_path):
    (tmp_path / "history").write_text("a file where the directory should be")
    trail = Audit(tmp_path / "history" / "audit.jsonl", Log(LogConfig(), ManualClock(), stream=make.log))
    for _ in range(2):
        Notes(ManualClock(), trail.keep).note("server", "started")
        trail.write()
    assert make.log.getvalue().count("the audit trail cannot be written down") == 1
