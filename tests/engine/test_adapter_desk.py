"""Which adapters a worker has, who waits for one, and what goes when memory is short."""

from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S, ManualClock
from penstock.engine.adapters.desk import PATIENCE_NS, AdapterDesk, AdapterRead, Released, Waiting
from penstock.errors import CheckpointError, WorkerUnavailable
from penstock.protocol.adapters import LoadAdapter, UnloadAdapter
from penstock.protocol.worker import Submit
from penstock.types import RequestId, SamplingParams

POOL_BYTES = 100


@dataclass
class Packed:
    num_bytes: int


class Reader:
    """Reads at once; what it reads, and whether it can, is the directory's name: "a", "bad"."""

    def __init__(self) -> None:
        self.read_names: list[str] = []
        self.may_go_on = Event()
        self.may_go_on.set()
        self.suffix = ""

    def fetch(self, path: str, *, again: bool = False) -> Path:
        return Path(path)

    def read(self, directory: Path, digest: str = "") -> tuple[str, Packed]:
        assert self.may_go_on.wait(10)
        self.read_names.append(directory.name)
        if directory.name == "bad":
            raise CheckpointError("bad: is no adapter")
        found = f"digest of {directory.name}{self.suffix}"
        if digest not in ("", found):
            raise CheckpointError(f"its digest is {found}, expected {digest}")
        return found, Packed(40)


class Desk:
    """A desk with its mail, and what came of it."""

    def __init__(self, slots: int = 2) -> None:
        self.reader, self.clock = Reader(), ManualClock()
        self.mail: SimpleQueue[AdapterRead] = SimpleQueue()
        self.desk = AdapterDesk(
            self.reader, self.reader, self.clock, slots=slots, post=self.mail.put, pool_bytes_max=POOL_BYTES
        )
        self.running: list[Waiting] = []
        self.failed: list[str] = []
        self._asked = 0

    def load(self, *names: str) -> None:
        for name in names:
            self.desk.load(LoadAdapter(name=name, path=f"/x/{name}"))
            self.read()

    def read(self) -> None:
        self.note(self.desk.take(self.mail.get(timeout=10)))

    def ask(self, name: str, digest: str = "") -> str:
        self._asked += 1
        message = Submit(
            request_id=RequestId(f"{name}{self._asked}"),
            prompt=b"",
            sampling=SamplingParams(),
            adapter=name,
            adapter_digest=digest,
        )
        self.note(self.desk.submit(1, message, self.clock.now_ns(), None))
        return message.request_id

    def note(self, released: Released) -> None:
        self.running += released.ready
        self.failed += [why for _, why in released.failed]
        self.desk.check_invariants()

    def end(self, request_id: str) -> None:
        found = next(each for each in self.running if each.message.request_id == request_id)
        self.running.remove(found)
        self.note(self.desk.finished(found.entry))

    @property
    def names(self) -> list[str]:
        return [each.message.request_id for each in self.running]


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    desk = Desk()
    desk.load("a")
    desk.reader.may_go_on.clear()
    desk.desk.load(LoadAdapter(name="b", path="/x/b"))
    waits, goes = desk.ask("b"), desk.ask("a")
    assert desk.names == [goes]
    assert [state.name for state in desk.desk.states()] == ["a"]
    desk.reader.may_go_on.set()
    desk.read()
    assert desk.names == [goes, waits]
    assert [state.name for state in desk.desk.states() if state.is_loaded] == ["a", "b"]


def test_one_that_cannot_be_read_fails_its_own_requests_only() -> None:
    desk = Desk()
    desk.load("a")
    desk.reader.may_go_on.clear()
    desk.desk.load(LoadAdapter(name="bad", path="/x/bad"))
    desk.ask("bad")
    desk.reader.may_go_on.set()
    desk.read()
    assert desk.failed == ["bad: is no adapter"]
    with pytest.raises(WorkerUnavailable, match="'bad': bad: is no adapter"):
        desk.ask("bad")
    with pytest.raises(WorkerUnavailable, match="does not serve the adapter 'other'"):
        desk.ask("other")
    assert desk.ask("a") in desk.names


def test_the_gateway_and_the_worker_mean_the_same_one() -> None:
    desk = Desk()
    desk.load("a")
    desk.ask("a", "digest of a")
    with pytest.raises(WorkerUnavailable, match="another one"):
        desk.ask("a", "digest of b")


def test_the_least_recently_used_goes_and_comes_back_as_it_was() -> None:
    desk = Desk()
    desk.load("a", "b")
    desk.end(desk.ask("a"))
    desk.load("c")
    assert {state.name: state.is_loaded for state in desk.desk.states()} == {"a": True, "b": False, "c": True}
    request = desk.ask("b")
    assert not desk.names
    desk.read()
    assert desk.names == [request]
    assert desk.reader.read_names == ["a", "b", "c", "b"]
    desk.end(request)
    desk.end(desk.ask("c"))
    desk.ask("a")  # It went when b came back; meanwhile its files have changed.
    desk.reader.suffix = ", but another"
    desk.read()
    assert desk.failed == ["its digest is digest of a, but another, expected digest of a"]


def test_what_is_in_use_stays() -> None:
    desk = Desk(slots=3)
    desk.load("a", "b")
    first, second = desk.ask("a"), desk.ask("b")
    desk.load("c")
    assert {state.name for state in desk.desk.states() if state.is_loaded} == {"a", "b"}
    assert desk.names == [first, second]


def test_slots_are_kept_for_who_waits() -> None:
    desk = Desk(slots=1)
    desk.load("a", "b")
    first, waits, passes = desk.ask("a"), desk.ask("b"), desk.ask("a")
    assert desk.names == [first, passes]
    desk.clock.advance(PATIENCE_NS + 1)
    held = desk.ask("a")
    desk.end(first)
    assert desk.names == [passes]
    desk.end(passes)
    assert desk.names == [waits]
    desk.end(waits)
    assert desk.names == [held]


def test_unloading_lets_requests_that_run_go_on() -> None:
    desk = Desk(slots=1)
    desk.load("a", "b")
    runs = desk.ask("a")
    desk.ask("b")
    desk.note(desk.desk.unload(UnloadAdapter("b")))
    desk.note(desk.desk.unload(UnloadAdapter("a")))
    assert desk.failed == ["it was unloaded"]
    assert desk.names == [runs]
    assert not desk.desk.states()
    desk.load("a")
    again = desk.ask("a")
    assert desk.names == [runs]  # The old one has the only slot.
    desk.end(runs)
    assert desk.names == [again]


def test_a_request_that_waits_can_be_aborted() -> None:
    desk = Desk(slots=1)
    desk.load("a", "b")
    desk.ask("a")
    request = RequestId(desk.ask("b"))
    assert not desk.desk.abort(2, request)
    assert desk.desk.abort(1, request)
    assert not desk.desk.num_waiting


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["ask", "end", "unload", "wait"]), st.integers(0, 4)), max_size=40),
)
def test_everybody_is_served_in_the_end(slots: int, moves: list[tuple[str, int]]) -> None:
    desk = Desk(slots)
    names = "abcde"
    desk.load(*names)
    asked = 0
    for move, number in moves:
        if move == "ask":
            asked += 1
            desk.ask(names[number])
        elif move == "end" and desk.running:
            desk.end(desk.names[number % len(desk.running)])
        elif move == "unload":
            desk.note(desk.desk.unload(UnloadAdapter(names[number])))
            desk.load(names[number])
        else:
            desk.clock.advance(NS_PER_S)
    done = asked - desk.desk.num_waiting - len(desk.running) - len(desk.failed)
    while desk.running or desk.desk.num_waiting:
        if desk.running:
            desk.end(desk.names[0])
            done += 1
        else:
            desk.read()
    assert done + len(desk.failed) == asked
