"""Pauses of the thread that reads adapters: while steps run, and in proportion to its work."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S, ManualClock
from penstock.engine.adapters import pauses
from penstock.engine.adapters.manager import AdapterManager, AdapterRead
from penstock.engine.adapters.pauses import AWAITED_SHARE, PAUSE_S_MAX, SHARE, Pauses, pause_s
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import LoadAdapter
from penstock.types import RequestId, SamplingParams


def test_pauses_are_in_proportion_to_the_work_before_them_and_bounded() -> None:
    assert AWAITED_SHARE < SHARE
    assert pause_s(2 * NS_PER_MS, is_awaited=False) == 0.002 * SHARE
    assert pause_s(2 * NS_PER_MS, is_awaited=True) == 0.002 * AWAITED_SHARE
    assert pause_s(0, is_awaited=False) == 0
    assert pause_s(NS_PER_S, is_awaited=False) == pause_s(NS_PER_S, is_awaited=True) == PAUSE_S_MAX


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is not over before the test is, except where requests wait: then there is none."""
    monkeypatch.setattr(pauses, "PAUSE_S_MAX", 60.0)
    monkeypatch.setattr(pauses, "AWAITED_SHARE", 0.0)


@pytest.mark.usefixtures("long")
def test_nothing_pauses_while_no_steps_run_and_who_pauses_goes_on_when_they_end() -> None:
    clock, passed = ManualClock(), SimpleQueue[str]()
    found = Pauses(clock)
    clock.advance(60 * NS_PER_S)
    found.pause()  # Comes back: no steps run.
    found.steps_run(True)

    def work() -> None:
        clock.advance(60 * NS_PER_S)
        found.pause()
        passed.put("done")

    thread = Thread(target=work)
    thread.start()
    with pytest.raises(Empty):
        passed.get(timeout=0.1)
    found.steps_run(False)
    assert passed.get(timeout=5) == "done"
    thread.join()


@dataclass
class Packed:
    num_bytes: int


class PausingReader:
    """Reads in a piece that takes a minute."""

    bytes_max = 100

    def __init__(self) -> None:
        self.clock, self.mail = ManualClock(), SimpleQueue[AdapterRead]()
        self.may_begin = Event()
        self.manager = AdapterManager(self, self, self.clock, slots=1, post=self.mail.put)

    def fetch(self, path: str, *, again: bool = False) -> Path:
        del again
        return Path(path)

    def read(self, directory: Path, digest: str, pause: Callable[[], None]) -> tuple[str, Packed]:
        del directory, digest
        assert self.may_begin.wait(10)
        self.clock.advance(60 * NS_PER_S)
        pause()
        return "digest", Packed(1)


@pytest.mark.usefixtures("long")
def test_a_load_pauses_while_steps_run_until_its_worker_closes() -> None:
    reader = PausingReader()
    reader.manager.take_order(LoadAdapter(name="a", path="/x/a"))
    reader.manager.steps_run(True)
    reader.may_begin.set()
    with pytest.raises(Empty):
        reader.mail.get(timeout=0.1)
    reader.manager.close()
    assert reader.mail.get(timeout=5).digest == "digest"


@pytest.mark.usefixtures("long")
def test_a_load_that_a_request_waits_for_pauses_less_beside_steps() -> None:
    reader = PausingReader()
    reader.manager.take_order(LoadAdapter(name="a", path="/x/a"))
    asked = Submit(request_id=RequestId("r"), prompt=b"", sampling=SamplingParams(), adapter="a")
    reader.manager.submit(1, asked, 0, None)
    reader.manager.steps_run(True)
    reader.may_begin.set()
    assert reader.mail.get(timeout=5).digest == "digest"
    reader.manager.close()
