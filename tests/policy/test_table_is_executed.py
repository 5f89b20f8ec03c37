"""The table of a request's life is what happens: without any one of its cells, or any one step of a cell,
some life here goes wrong.
"""

import pytest

from penstock.clock import NS_PER_S
from penstock.errors import StreamBroken, WorkerUnavailable
from penstock.policy import request as request_module
from penstock.policy.contracts import Pass
from penstock.policy.flow import (
    TABLE,
    Abort,
    Event,
    FallBack,
    Outcome,
    Queued,
    RequestFacts,
    Requeued,
    Start,
    State,
    Stop,
)
from penstock.policy.flow import Diverted as Divert
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict, Settled
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

S = NS_PER_S
R, W, V = RequestId("r"), WorkerId("w"), WorkerId("v")
GONE, BROKEN = WorkerUnavailable("gone"), StreamBroken("gone")
SLICE = 4


class Hold:
    """Of limits; counts itself until it is settled or undone, exactly once."""

    def __init__(self, holds: "Holds") -> None:
        self._holds, self._open = holds, True
        holds.num_open += 1

    def renew(self, now_ns: int, total: int) -> None:
        assert self._open, "what has ended is not renewed"

    def settle(self, now_ns: int, actual: int) -> None:
        self._close()
        self._holds.settled.append(actual)

    def undo(self, now_ns: int) -> None:
        self._close()

    def _close(self) -> None:
        assert self._open, "closed twice"
        self._open = False
        self._holds.num_open -= 1


class Holds:
    """Limits."""

    def __init__(self) -> None:
        self.num_open, self.settled = 0, []

    def reserve(self, *_: object, **__: object) -> Hold:
        return Hold(self)


class Money:
    """Budgets, of so many slices, and prices: every hold is settled, exactly once."""

    are_any = True

    def __init__(self, slices: int) -> None:
        self.num_open, self._slices = 0, slices

    def cost_micros(self, *_: object) -> int:
        return 1

    def reserve(self, *_: object) -> None:
        self.num_open += 1

    def renew(self, *_: object) -> bool:
        assert self.num_open == 1, "what has ended is not renewed"
        self._slices -= 1
        return self._slices >= 0

    def settle(self, *_: object) -> None:
        assert self.num_open, "settled twice"
        self.num_open -= 1


class Elsewhere:
    """Sends what cannot be served by `m` to `n`."""

    def decide(self, now_ns, facts, look) -> Pass | Divert:
        if facts.route == "m" and not look("m").ready and look("n").ready:
            return Divert(facts.id, "n", "unavailable")
        return Pass()


class Life:
    """One request in front of one worker, or none."""

    def __init__(self, *, workers: int = 1, slices: int = 1000) -> None:
        self.limits, self.money = Holds(), Money(slices)
        parts = Policies(
            limits=self.limits,
            budgets=self.money,
            prices=self.money,
            admission=Elsewhere(),
            slice_tokens=SLICE,
        )
        self.control = FlowControl(QueueTerms(worker_credit=0, retries_max=3), parts)
        for worker in (W, V)[:workers]:
            self.control.set_worker(0, "m", worker, WorkerView(max_running=4, resumes=True))
        facts = RequestFacts(id=R, route="m", prompt_tokens=32, max_tokens=100)
        assert isinstance(self.control.arrive(0, facts), Queued)

    def start(self, now_ns: int = 0) -> None:
        (start,) = self.control.dispatch(now_ns)
        assert isinstance(start, Start)

    def settled(self, answer: object, outcome: Outcome, tokens: int = 0) -> None:
        """It has ended so, once, and holds nothing of anything."""
        assert isinstance(answer, Settled), answer
        record = answer.request.record(0)
        assert (record.outcome, record.completion_tokens) == (outcome, tokens)
        assert not len(self.control)
        assert (self.limits.num_open, len(self.limits.settled)) == (0, 1)
        assert not self.money.num_open
        for model_queue in filter(None, map(self.control.model_queue, "mn")):
            model_queue.check_invariants()
            assert not model_queue.queue.num_waiting
            assert not any(band.num_running for band in model_queue.queue.bands)
            assert not any(worker.booked for worker in model_queue.workers)

    def end(self, outcome: Outcome, tokens: int = 0) -> None:
        answer = self.control.ended(9 * S, R, outcome, Usage(prompt_tokens=32, completion_tokens=tokens))
        self.settled(answer, outcome, tokens)


def waits_and_ends() -> None:
    life = Life(workers=0)
    life.settled(life.control.cancel(S, R), Outcome.CANCELLED)
    life = Life(workers=0)
    life.settled(life.control.failed(S, R, GONE, retry=False), Outcome.FAILED)
    life = Life(workers=0)
    life.control.drain(S, S)
    (evict,) = life.control.dispatch(S)
    assert isinstance(evict, Evict)
    life.settled(evict.settled, Outcome.EVICTED)


def moves() -> None:
    life = Life(workers=0)
    life.control.set_worker(S, "n", V, WorkerView(max_running=4))
    (found,) = life.control.dispatch(S)
    assert isinstance(found, FallBack)
    facts = RequestFacts(id=R, route="n", prompt_tokens=40, max_tokens=100, diverted="unavailable")
    assert life.control.move(S, facts)
    life.start(S)
    assert (life.control.request(R).worker, life.control.request(R).facts.prompt_tokens) == (V, 40)
    life.end(Outcome.FINISHED, 3)


def answers() -> None:
    life = Life()
    life.start()
    life.end(Outcome.FINISHED)
    life = Life()
    life.start()
    life.control.first_output(S, R)
    life.control.first_output(S, R)
    assert life.control.output(2 * S, R, 3) is None
    life.end(Outcome.FINISHED, 5)


def fails() -> None:
    for streams in (False, True):
        life = Life()
        life.start()
        if streams:
            assert life.control.output(S, R, 3) is None
        error = BROKEN if streams else GONE
        tokens = 3 if streams else 0
        life.settled(life.control.failed(2 * S, R, error, retry=False), Outcome.FAILED, tokens)


def is_tried_again() -> None:
    life = Life(workers=2)
    life.start()
    assert isinstance(life.control.failed(S, R, GONE, retry=True), Requeued)
    life.start(S)
    life.control.first_output(2 * S, R)
    assert isinstance(life.control.failed(3 * S, R, BROKEN, retry=True), Requeued)
    life.start(3 * S)
    assert isinstance(life.control.failed(4 * S, R, BROKEN, retry=True), Requeued)
    life.start(4 * S)
    life.end(Outcome.FINISHED, 7)


def is_stopped() -> None:
    life = Life(slices=0)
    life.start()
    assert life.control.output(S, R, SLICE) == Stop(R, W)
    life.end(Outcome.FINISHED, SLICE)


def client_leaves() -> None:
    for streams in (False, True):
        for ends_well in (False, True):
            life = Life()
            life.start()
            if streams:
                life.control.first_output(S, R)
            assert life.control.cancel(2 * S, R) == Abort(R, W)
            life.control.first_output(2 * S, R)
            assert life.control.output(2 * S, R, 2) is None
            assert life.control.cancel(2 * S, R) is None
            if ends_well:
                life.end(Outcome.CANCELLED, 4)
            else:
                life.settled(life.control.failed(3 * S, R, BROKEN, retry=True), Outcome.CANCELLED, 2)


def gives_way() -> None:
    for streams in (False, True):
        life = Life()
        life.start()
        if streams:
            life.control.first_output(S, R)
        life.control.drain(2 * S, 2 * S)
        (evict,) = life.control.dispatch(2 * S)
        assert isinstance(evict, Evict)
        assert (evict.worker_id, evict.settled) == (W, None)
        assert life.control.request(R).state is State.STOPPING
        life.end(Outcome.EVICTED, 1 if streams else 0)


LIVES = (waits_and_ends, moves, answers, fails, is_tried_again, is_stopped, client_leaves, gives_way)


def all_lives() -> None:
    for life in LIVES:
        life()


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_lives(life) -> None:
    life()


def without(cell: tuple[State, Event], step: int | None) -> list:
    """The table as it is executed, without a cell or a step of it."""
    table = dict(TABLE)
    then, steps = table.pop(cell)
    if step is not None:
        table[cell] = (then, steps[:step] + steps[step + 1 :])
    return [[table.get((state, event)) for event in Event] for state in State]


CUTS = [(cell, step) for cell, (_, steps) in TABLE.items() for step in (None, *range(len(steps)))]


@pytest.mark.parametrize(
    ("cell", "step"),
    CUTS,
    ids=lambda each: "-".join(part.name for part in each) if isinstance(each, tuple) else str(each),
)
def test_nothing_of_it_can_be_left_out(monkeypatch, cell, step) -> None:
    monkeypatch.setattr(request_module, "_MOVES", without(cell, step))
    with pytest.raises(Exception):  # noqa: B017, PT011 - an assertion here or in the product, or what follows from it.
        all_lives()
