"""Which adapters a worker has, who waits for one, and what goes when memory is short."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S, ManualClock
from penstock.engine.adapters.manager import AdapterManager, AdapterRead, Released, Waiting
from penstock.errors import CheckpointError, WorkerUnavailable
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import KeepAdapters, LoadAdapter, UnloadAdapter
from penstock.schedule.adapters import PATIENCE_NS
from penstock.types import RequestId, SamplingParams

POOL_BYTES = 100


@dataclass
class Packed:
    num_bytes: int


class Reader:
    """Reads at once; what it reads, and whether it can, is the directory's name: "a", "bad"."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.read_names: list[str] = []
        self.may_go_on = Event()
        self.may_go_on.set()
        self.suffix, self.error = "", "bad: is no adapter"

    def fetch(self, path: str, *, again: bool = False) -> Path:
        return Path(path)

    def read(self, directory: Path, digest: str, pause: Callable[[], None]) -> tuple[str, Packed]:
        assert self.may_go_on.wait(10)
        pause()
        self.read_names.append(directory.name)
        if directory.name == "bad":
            raise CheckpointError(self.error)
        found = f"digest of {directory.name}{self.suffix}"
        if digest not in ("", found):
            raise CheckpointError(f"its digest is {found}, expected {digest}")
        return found, Packed(40)


class Driven:
    """A manager with its mail, and what came of it."""

    def __init__(self, slots: int = 2, bytes_max: int = POOL_BYTES) -> None:
        self.reader, self.clock = Reader(bytes_max), ManualClock()
        self.mail: SimpleQueue[AdapterRead] = SimpleQueue()
        self.manager = AdapterManager(self.reader, self.reader, self.clock, slots=slots, post=self.mail.put)
        self.running: list[Waiting] = []
        self.failed: list[str] = []
        self._asked = 0

    def load(self, *names: str) -> None:
        for name in names:
            self.order(name)
            self.read()

    def order(self, name: str) -> None:
        self.note(self.manager.take_order(LoadAdapter(name=name, path=f"/x/{name}")))

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
        self.manager.pool.check_invariants()

    def end(self, request_id: str) -> None:
        found = next(each for each in self.running if each.request.message.request_id == request_id)
        self.running.remove(found)
        self.note(self.manager.finished(found.entry))

    @property
    def loaded(self) -> set[str]:
        return {state.name for state in self.manager.reported().adapters if state.is_loaded}

    @property
    def names(self) -> list[str]:
        return [each.request.message.request_id for each in self.running]


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    driven = Driven()
    driven.load("a")
    driven.reader.may_go_on.clear()
    driven.order("b")
    waits, goes = driven.ask("b"), driven.ask("a")
    assert driven.names == [goes]
    assert [state.name for state in driven.manager.reported().adapters] == ["a"]
    driven.reader.may_go_on.set()
    driven.read()
    assert driven.names == [goes, waits]
    assert [state.name for state in driven.manager.reported().adapters if state.is_loaded] == ["a", "b"]


def test_one_that_cannot_be_read_fails_its_own_requests_only() -> None:
    driven = Driven()
    driven.load("a")
    driven.reader.may_go_on.clear()
    driven.order("bad")
    driven.ask("bad")
    driven.reader.may_go_on.set()
    driven.read()
    assert driven.failed == ["bad: is no adapter"]
    with pytest.raises(WorkerUnavailable, match=r"does not serve the adapter 'bad'$"):
        driven.ask("bad")
    with pytest.raises(WorkerUnavailable, match="does not serve the adapter 'other'"):
        driven.ask("other")
    assert driven.ask("a") in driven.names


def test_an_error_names_where_the_adapter_came_from_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, path = Driven(), "https://me:secret@host/bad?signature=5f0c"
    monkeypatch.setattr(driven.reader, "fetch", lambda path, again=False: Path("/copies/17/bad"))
    driven.reader.error = "/copies/17/bad/adapter_config.json: is malformed"
    driven.note(driven.manager.take_order(LoadAdapter(name="bad", path=path)))
    driven.read()
    [state] = driven.manager.reported().adapters
    assert state.error == "https://host/bad/adapter_config.json: is malformed"


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
    driven.load("c")  # Nobody has asked for it: it is known to be sound, and makes no room for itself.
    assert driven.loaded == {"a", "b"}
    request = driven.ask("c")
    driven.read()
    driven.end(request)
    assert driven.loaded == {"a", "c"}
    request = driven.ask("b")
    assert not driven.names
    driven.read()
    assert driven.names == [request]
    assert driven.reader.read_names == ["a", "b", "c", "c", "b"]
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
    assert {state.name for state in driven.manager.reported().adapters if state.is_loaded} == {"a", "b"}
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
    driven.note(driven.manager.take_order(UnloadAdapter("b")))
    driven.note(driven.manager.take_order(UnloadAdapter("a")))
    assert driven.failed == ["it was unloaded"]
    assert driven.names == [runs]
    assert not driven.manager.reported().adapters
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
    st.lists(
        st.tuples(st.sampled_from(["ask", "end", "unload", "keep", "wait"]), st.integers(0, 4)), max_size=40
    ),
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
            driven.note(driven.manager.take_order(UnloadAdapter(names[number])))
            driven.load(names[number])
        elif move == "keep":
            driven.note(driven.manager.take_order(KeepAdapters((names[number], names[0]))))
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


def test_what_is_to_be_kept_is_read_when_nothing_is_more_urgent_and_goes_last() -> None:
    driven = Driven()
    driven.load("a", "b", "c")
    assert driven.loaded == {"a", "b"}
    driven.note(driven.manager.take_order(KeepAdapters(("c",))))
    driven.read()
    assert driven.loaded == {"a", "c"} or driven.loaded == {"b", "c"}
    for name in ("a", "b", "a"):
        request = driven.ask(name)
        if request not in driven.names:
            driven.read()
        driven.end(request)
        assert "c" in driven.loaded, "others come and go beside it"
    driven.note(driven.manager.take_order(KeepAdapters(())))
    request = driven.ask("b")
    driven.read()
    driven.end(request)
    assert driven.loaded == {"a", "b"}


def test_a_read_that_nobody_waits_for_is_given_up_for_one_that_a_request_waits_for() -> None:
    driven = Driven()
    driven.load("a", "b", "c")
    driven.reader.may_go_on.clear()
    driven.note(driven.manager.take_order(KeepAdapters(("c",))))
    waits = driven.ask("b")
    assert driven.names == [waits], "in memory"
    driven.order("d")
    asked = driven.ask("d")
    driven.reader.may_go_on.set()
    for _ in range(2):  # The end of what was given up, and "d".
        driven.read()
    assert driven.reader.read_names == ["a", "b", "c", "d"]
    assert driven.names == [waits, asked]
    driven.end(waits)
    driven.end(asked)
    driven.read()
    assert driven.reader.read_names[-1] == "c"
    assert "c" in driven.loaded, "nothing was more urgent"


def test_a_read_that_was_given_up_is_begun_again_where_a_request_came_for_it() -> None:
    driven = Driven()
    driven.load("a", "b", "c")
    driven.reader.may_go_on.clear()
    driven.note(driven.manager.take_order(KeepAdapters(("c",))))
    driven.order("d")
    asked = driven.ask("d"), driven.ask("c")
    driven.reader.may_go_on.set()
    for _ in range(3):
        driven.read()
    assert driven.reader.read_names == ["a", "b", "c", "d", "c"]
    assert driven.names == list(asked)


def test_one_that_will_be_asked_for_is_read_before_those_that_nobody_has_asked_for() -> None:
    driven = Driven()
    driven.load("a", "b", "c")
    driven.reader.may_go_on.clear()
    for name in ("d", "e", "f"):
        driven.order(name)
    driven.note(driven.manager.take_order(LoadAdapter(name="c", path="/x/c", is_wanted=True)))
    waits = driven.ask("f")
    driven.reader.may_go_on.set()
    for _ in range(4):
        driven.read()
    assert driven.reader.read_names == ["a", "b", "c", "d", "f", "c", "e"]
    assert driven.names == [waits]
    assert "c" in driven.loaded
    assert driven.manager.reported().room == POOL_BYTES // 40


def test_what_is_read_is_awaited_by_requests_for_it_and_for_what_is_read_next() -> None:
    driven = Driven()
    pool = driven.manager.pool
    driven.reader.may_go_on.clear()
    driven.order("a")
    assert not pool.is_awaited
    driven.ask("a")
    assert pool.is_awaited
    driven.reader.may_go_on.set()
    driven.read()
    assert not pool.is_awaited
    driven.reader.may_go_on.clear()
    driven.order("b")
    assert not pool.is_awaited
    driven.note(driven.manager.take_order(LoadAdapter(name="c", path="/x/c", is_wanted=True)))
    assert pool.is_awaited, "the next one is, and comes after this one"
    driven.reader.may_go_on.set()
    driven.read()
    assert pool.is_awaited
    driven.read()
    assert driven.reader.read_names == ["a", "b", "c"]
    assert not pool.is_awaited


def test_memory_is_never_exceeded_by_what_is_in_use_and_nobody_starves() -> None:
    driven = Driven(slots=3)
    driven.load("a", "b", "c")
    first, second = driven.ask("a"), driven.ask("b")
    waits = driven.ask("c")
    assert driven.loaded == {"a", "b"}, "both are pinned, and there is room for two"
    driven.clock.advance(PATIENCE_NS + 1)
    held = driven.ask("a")  # Or "a" would be in use for ever.
    driven.end(first)
    driven.read()
    assert driven.names == [second, waits]
    assert driven.loaded == {"b", "c"}
    driven.end(second)
    driven.read()
    assert driven.names == [waits, held]


def test_one_that_is_larger_than_all_the_memory_is_refused_and_says_why() -> None:
    driven = Driven(bytes_max=30)
    driven.load("a")
    (state,) = driven.manager.reported().adapters
    assert "it takes 40 bytes, and all adapters have 30" in state.error
    with pytest.raises(WorkerUnavailable, match=r"does not serve the adapter 'a'$"):
        driven.ask("a")


def test_a_worker_knows_so_many_and_says_so_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.schedule.adapters.KNOWN_MAX", 2)
    driven = Driven()
    driven.load("a", "b")
    driven.order("c")
    assert driven.loaded == {"a", "b"}
    with pytest.raises(WorkerUnavailable, match="does not serve the adapter 'c'"):
        driven.ask("c")
