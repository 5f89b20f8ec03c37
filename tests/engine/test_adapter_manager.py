"""Which adapters a worker has, who waits for one, and what goes when memory is short."""

from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S, ManualClock
from penstock.engine.adapters.manager import PATIENCE_NS, AdapterManager, AdapterRead, Released, Waiting
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


class Driven:
    """A manager with its mail, and what came of it."""

    def __init__(self, slots: int = 2) -> None:
        self.reader, self.clock = Reader(), ManualClock()
        self.mail: SimpleQueue[AdapterRead] = SimpleQueue()
        self.manager = AdapterManager(
            self.reader, self.reader, self.clock, slots=slots, post=self.mail.put, pool_bytes_max=POOL_BYTES
        )
        self.running: list[Waiting] = []
        self.failed: list[str] = []
        self._asked = 0

    def load(self, *names: str) -> None:
        for name in names:
            self.manager.load(LoadAdapter(name=name, path=f"/x/{name}"))
            self.read()

    def read(self) -> None:
        self.note(self.manager.take(self.mail.get(timeout=10)))

    def ask(self, name: str, digest: str = "") -> str:
        self._asked += 1
        message = Submit(
            request_id=RequestId(f"{name}{self._asked}"),
            prompt=b"",
            sampling=SamplingParams(),
            adapter=name,
            adapter_digest=digest,
        )
        self.note(self.manager.submit(1, message, self.clock.now_ns(), None))
        return message.request_id

    def note(self, released: Released) -> None:
        self.running += released.ready
        self.failed += [why for _, why in released.failed]
        self.manager.check_invariants()

    def end(self, request_id: str) -> None:
        found = next(each for each in self.running if each.message.request_id == request_id)
        self.running.remove(found)
        self.note(self.manager.finished(found.entry))

    @property
    def names(self) -> list[str]:
        return [each.message.request_id for each in self.running]


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    driven = Driven()
    driven.load("a")
    driven.reader.may_go_on.clear()
    driven.manager.load(LoadAdapter(name="b", path="/x/b"))
    waits, goes = driven.ask("b"), driven.ask("a")
    assert driven.names == [goes]
    assert [state.name for state in driven.manager.states()] == ["a"]
    driven.reader.may_go_on.set()
    driven.read()
    assert driven.names == [goes, waits]
    assert [state.name for state in driven.manager.states() if state.is_loaded] == ["a", "b"]


def test_one_that_cannot_be_read_fails_its_own_requests_only() -> None:
    driven = Driven()
    driven.load("a")
    driven.reader.may_go_on.clear()
    driven.manager.load(LoadAdapter(name="bad", path="/x/bad"))
    driven.ask("bad")
    driven.reader.may_go_on.set()
    driven.read()
    assert driven.failed == ["bad: is no adapter"]
    with pytest.raises(WorkerUnavailable, match="'bad': bad: is no adapter"):
        driven.ask("bad")
    with pytest.raises(WorkerUnavailable, match="does not serve the adapter 'other'"):
        driven.ask("other")
    assert driven.ask("a") in driven.names


def test_the_gateway_and_the_worker_mean_the_same_one() -> None:
    driven = Driven()
    driven.load("a")
    driven.ask("a", "digest of a")
    with pytest.raises(WorkerUnavailable, match="another one"):
        driven.ask("a", "digest of b")


def test_the_least_recently_used_goes_and_comes_back_as_it_was() -> None:
    driven = Driven()
    driven.load("a", "b")
    driven.end(driven.ask("a"))
    driven.load("c")
    assert {state.name: state.is_loaded for state in driven.manager.states()} == {
        "a": True,
        "b": False,
        "c": True,
    }
    request = driven.ask("b")
    assert not driven.names
    driven.read()
    assert driven.names == [request]
    assert driven.reader.read_names == ["a", "b", "c", "b"]
    driven.end(request)
    driven.end(driven.ask("c"))
    driven.ask("a")  # It went when b came back; meanwhile its files have changed.
    driven.reader.suffix = ", but another"
    driven.read()
    assert driven.failed == ["its digest is digest of a, but another, expected digest of a"]


def test_what_is_in_use_stays() -> None:
    driven = Driven(slots=3)
    driven.load("a", "b")
    first, second = driven.ask("a"), driven.ask("b")
    driven.load("c")
    assert {state.name for state in driven.manager.states() if state.is_loaded} == {"a", "b"}
    assert driven.names == [first, second]


def test_slots_are_kept_for_who_waits() -> None:
    driven = Driven(slots=1)
    driven.load("a", "b")
    first, waits, passes = driven.ask("a"), driven.ask("b"), driven.ask("a")
    assert driven.names == [first, passes]
    driven.clock.advance(PATIENCE_NS + 1)
    held = driven.ask("a")
    driven.end(first)
    assert driven.names == [passes]
    driven.end(passes)
    assert driven.names == [waits]
    driven.end(waits)
    assert driven.names == [held]


def test_unloading_lets_requests_that_run_go_on() -> None:
    driven = Driven(slots=1)
    driven.load("a", "b")
    runs = driven.ask("a")
    driven.ask("b")
    driven.note(driven.manager.unload(UnloadAdapter("b")))
    driven.note(driven.manager.unload(UnloadAdapter("a")))
    assert driven.failed == ["it was unloaded"]
    assert driven.names == [runs]
    assert not driven.manager.states()
    driven.load("a")
    again = driven.ask("a")
    assert driven.names == [runs]  # The old one has the only slot.
    driven.end(runs)
    assert driven.names == [again]


def test_a_request_that_waits_can_be_aborted() -> None:
    driven = Driven(slots=1)
    driven.load("a", "b")
    driven.ask("a")
    request = RequestId(driven.ask("b"))
    assert not driven.manager.abort(2, request)
    assert driven.manager.abort(1, request)
    assert not driven.manager.num_waiting


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["ask", "end", "unload", "wait"]), st.integers(0, 4)), max_size=40),
)
def test_everybody_is_served_in_the_end(slots: int, moves: list[tuple[str, int]]) -> None:
    driven = Driven(slots)
    names = "abcde"
    driven.load(*names)
    asked = 0
    for move, number in moves:
        if move == "ask":
            asked += 1
            driven.ask(names[number])
        elif move == "end" and driven.running:
            driven.end(driven.names[number % len(driven.running)])
        elif move == "unload":
            driven.note(driven.manager.unload(UnloadAdapter(names[number])))
            driven.load(names[number])
        else:
            driven.clock.advance(NS_PER_S)
    done = asked - driven.manager.num_waiting - len(driven.running) - len(driven.failed)
    while driven.running or driven.manager.num_waiting:
        if driven.running:
            driven.end(driven.names[0])
            done += 1
        else:
            driven.read()
    assert done + len(driven.failed) == asked
