"""Decisions on disk: found by any process, bounded, and not lost by half a batch."""

import asyncio
import contextlib
import io
import threading
from collections import deque
from pathlib import Path

import msgspec
import pytest

from penstock.clock import NS_PER_S, SystemClock
from penstock.config.tree import LogConfig
from penstock.policy.placement.pick import Choice, ComplexityChoice, Decision, explain
from penstock.policy.placement.score import ScoredRequest, WorkerFacts
from penstock.policy.terms import PlacementTerms
from penstock.telemetry import decision_files
from penstock.telemetry.decision_files import KEPT_S, DecisionEntry, DecisionFiles, DecisionKeeper
from penstock.telemetry.log import Log
from penstock.types import RequestId, WorkerId


class WallClock(SystemClock):
    def __init__(self) -> None:
        self.ns = 1_700_000_000 * NS_PER_S

    def wall_ns(self) -> int:
        return self.ns


def decision(name: str) -> Decision:
    workers = (WorkerFacts(WorkerId("w-0"), 0), WorkerFacts(WorkerId("w-1"), 1, filtered="context"))
    return Decision(
        request_id=RequestId(name),
        route="m",
        at_ns=7,
        config=PlacementTerms(explore=0.0),
        request=ScoredRequest(prompt_tokens=100, output_tokens=10),
        candidates=workers,
        draws=(),
        choice=Choice(0, "only"),
    )


def entry(name: str) -> DecisionEntry:
    return DecisionEntry(RequestId(name), decision=decision(name))


def test_what_one_wrote_the_other_finds(tmp_path: Path) -> None:
    clock = WallClock()
    one, other = DecisionFiles(tmp_path, clock), DecisionFiles(tmp_path, clock)
    choice = ComplexityChoice("m", 0.31, (("code", 0.2), ("simple", -0.05)))
    one.append([entry("a"), DecisionEntry(RequestId("b"), choice=choice)])
    other.append([entry("c")])
    one.append([entry("a")])
    for each in (one, other, DecisionFiles(tmp_path, clock)):
        assert each.find(RequestId("a")) == [entry("a"), entry("a")]
        assert each.find(RequestId("b")) == [DecisionEntry(RequestId("b"), choice=choice)]
        assert each.find(RequestId("c")) == [entry("c")]
        assert each.find(RequestId("d")) == []
    one.close()
    other.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_half_a_batch_hides_nothing_before_it(tmp_path: Path) -> None:
    files = DecisionFiles(tmp_path, WallClock())
    files.append([entry("a")])
    files.append([entry("b")])
    files.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again = DecisionFiles(tmp_path, WallClock())
    assert again.find(RequestId("a")) == [entry("a")]
    assert again.find(RequestId("b")) == []


def test_the_bytes_on_disk_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    clock, bytes_max = WallClock(), 40_000
    files = DecisionFiles(tmp_path, clock, bytes_max=bytes_max)
    for batch in range(300):
        clock.ns += NS_PER_S
        files.append([entry(f"r-{batch}-{i}") for i in range(20)])
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert size < bytes_max + 5_000
    assert files.find(RequestId("r-299-19")) == [entry("r-299-19")]
    assert files.find(RequestId("r-0-0")) == []
    files.close()


def test_old_files_go(tmp_path: Path) -> None:
    clock = WallClock()
    clock.ns = SystemClock().wall_ns()  # Files are stamped by the system.
    files = DecisionFiles(tmp_path, clock)
    files.append([entry("a")])
    clock.ns += int((KEPT_S + 1) * NS_PER_S)
    files.append([entry("b")])
    assert files.find(RequestId("a")) == []
    assert len(list(tmp_path.iterdir())) == 1
    files.close()


def test_a_replay_of_what_was_read_is_equal_to_the_bit(tmp_path: Path) -> None:
    files = DecisionFiles(tmp_path, WallClock())
    files.append([entry("a")])
    (found,) = files.find(RequestId("a"))
    assert found.decision is not None
    replayed = explain(found.decision)["replay"]
    assert replayed["is_equal"]
    assert replayed["worker"] == "w-0"
    altered = msgspec.structs.replace(found.decision, candidates=found.decision.candidates[1:])
    assert not explain(altered)["replay"]["is_equal"]  # The only worker that was left had been filtered.
    files.close()


def test_a_disk_that_takes_nothing_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_files, "FLUSH_S", 0.01)
    said = io.StringIO()
    (tmp_path / "file").write_text("in the way")
    log = Log(LogConfig(), SystemClock(), stream=said)
    keeper = DecisionKeeper(DecisionFiles(tmp_path / "file" / "decisions", SystemClock()), log)

    async def check() -> None:
        for name in "abc":
            keeper.decided(decision(name))
            await keeper.find(RequestId(name))
        await keeper.stop()

    asyncio.run(check())
    log.flush()
    assert said.getvalue().count("decisions cannot be written down") == 1


def test_two_who_look_while_there_is_something_to_write_both_find_it(tmp_path: Path) -> None:
    meeting = threading.Barrier(2)

    class Pending(deque[DecisionEntry]):
        def popleft(self) -> DecisionEntry:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.05)  # Two threads that were let in here would both take the one entry.
            return super().popleft()

    async def check() -> None:
        keeper = DecisionKeeper(
            DecisionFiles(tmp_path, SystemClock()),
            Log(LogConfig(), SystemClock(), stream=io.StringIO()),
        )
        keeper._pending = Pending()
        keeper.start()
        keeper.decided(decision("a"))
        found = await asyncio.gather(*(keeper.find(RequestId("a")) for _ in range(2)))
        assert found == [[entry("a")], [entry("a")]]
        await keeper.stop()

    asyncio.run(check())
