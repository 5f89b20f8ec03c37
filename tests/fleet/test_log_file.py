"""What a worker prints is kept, and cannot fill the disk."""

from pathlib import Path

from penstock.clock import ManualClock
from penstock.fleet.launchers import process
from penstock.fleet.launchers.process import LogFile, WorkerLogs


def test_lines_carry_the_time_and_survive_a_restart(tmp_path: Path) -> None:
    for word in ("first", "second"):
        LogFile(tmp_path / "logs", "m/x-0", ManualClock()).write(word)
    text = (tmp_path / "logs" / "m%2Fx-0.log").read_text()
    assert text == "2023-11-14T22:13:20.000+00:00 first\n2023-11-14T22:13:20.000+00:00 second\n"


def test_two_files_never_hold_more_than_the_bound_and_the_newest_is_there(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "w", ManualClock(), bytes_max=1000)
    for number in range(200):
        file.write(f"line {number} " + "x" * (number * 7 % 900))
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) <= 2
        assert sum(sizes) <= 1000
        assert f" line {number} " in file.path.read_text()


def test_a_disk_that_does_not_take_it_costs_only_the_lines(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    LogFile(tmp_path / "a-file", "w", ManualClock()).write("lost")
    assert (tmp_path / "a-file").read_text() == ""


def test_the_last_lines_of_each_worker_are_in_memory_and_bounded(monkeypatch) -> None:
    monkeypatch.setattr(process, "SHOWN_WORKERS_MAX", 2)
    logs, clock = WorkerLogs(lambda _: None), ManualClock(wall_ns=7_000_000_000)
    for name in ("a", "b"):
        logs.of(name, clock)(f"[{name}] {'x' * 9999}")
    again = logs.of("a", clock)
    for number in range(1000):
        again(f"[a] line {number}")
    lines = logs.tails.of("a")
    assert (len(lines), lines[-1].text, lines[-1].at_ms) == (process.SHOWN_LINES, "line 999", 7000)
    assert [len(line.text) for line in logs.tails.of("b")] == [process.SHOWN_CHARS_MAX]
    logs.of("c", clock)
    assert (logs.tails.of("a"), logs.tails.of("c"), logs.tails.of("none")) == (None, (), None)
