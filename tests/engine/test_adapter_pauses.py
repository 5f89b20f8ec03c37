"""Pauses of the thread that reads adapters: while steps run, and in proportion to its work."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from penstock.clock import NS_PER_MS, NS_PER_S, ManualClock
from penstock.engine.adapters.manager import AdapterManager, AdapterRead
from penstock.engine.adapters.pauses import PAUSE_S_MAX, SHARE, Pauses, pause_s
from penstock.protocol.worker_parts import LoadAdapter


def test_pauses_are_in_proportion_to_the_work_before_them_and_bounded() -> None:
    assert pause_s(2 * NS_PER_MS) == 0.002 * SHARE
    assert pause_s(0) == 0
    assert pause_s(NS_PER_S) == PAUSE_S_MAX


def test_nothing_pauses_while_no_steps_run_and_who_pauses_goes_on_when_they_end() -> None:
    clock, passed = ManualClock(), SimpleQueue[str]()
    pauses = Pauses(clock)
    clock.advance(NS_PER_S)
    pauses.pause()  # Comes back: no steps run.
    pauses.steps_run(True)

    def work() -> None:
        for _ in range(200):
            clock.advance(NS_PER_S)
            pauses.pause()  # 50 ms each while steps run: ten seconds in all.
        passed.put("done")

    thread = Thread(target=work)
    thread.start()
    pauses.steps_run(False)
    assert passed.get(timeout=5) == "done"
    thread.join()


@dataclass
class Packed:
    num_bytes: int


class PausingReader:
    """Reads in two pieces, and says when the first one is done."""

    bytes_max = 100

    def __init__(self) -> None:
        self.pauses: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.may_end = Event()

    def fetch(self, path: str, *, again: bool = False) -> Path:
        del again
        return Path(path)

    def read(self, directory: Path, digest: str, pause: Callable[[], None]) -> tuple[str, Packed]:
        del directory, digest
        self.pauses.put(pause)
        assert self.may_end.wait(10)
        return "digest", Packed(1)


def test_the_reader_is_given_the_managers_pauses() -> None:
    reader, mail = PausingReader(), SimpleQueue[AdapterRead]()
    manager = AdapterManager(reader, reader, ManualClock(), slots=1, post=mail.put)
    manager.take_order(LoadAdapter(name="a", path="/x/a"))
    assert reader.pauses.get(timeout=10) == manager.pauses.pause
    reader.may_end.set()
    assert mail.get(timeout=10).digest == "digest"
    manager.close()
