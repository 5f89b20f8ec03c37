"""The table of a worker's life: complete, and only what is ready is capacity."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.policy.resilience.worker_state import TABLE, WorkerEvent, WorkerLife, WorkerState

UP = tuple(state for state in WorkerState if state not in (WorkerState.DRAINING, WorkerState.GONE))


def play(*events: WorkerEvent) -> WorkerLife:
    life = WorkerLife(0)
    for at, event in enumerate(events, 1):
        life.on(event, at)
    return life


def test_every_state_takes_every_event() -> None:
    assert set(TABLE) == set(WorkerState)
    assert all(set(moves) == set(WorkerEvent) for moves in TABLE.values())


def test_an_ordinary_life() -> None:
    life = WorkerLife(0)
    seen = [life.state]
    for at, event in enumerate(("loading", "loading", "warming", "serving", "drain", "lost", "end"), 1):
        if life.on(WorkerEvent(event), at):
            seen.append(life.state)
    assert seen == ["starting", "loading", "warming", "ready", "draining", "gone"]
    assert (life.epoch, life.since_ns) == (1, 7)


def test_a_new_life_is_a_new_epoch() -> None:
    assert play(WorkerEvent.SERVING, WorkerEvent.LOST).epoch == 2
    assert play(WorkerEvent.SERVING, WorkerEvent.LOST, WorkerEvent.STARTED, WorkerEvent.LOADING).epoch == 2
    assert play(WorkerEvent.SERVING, WorkerEvent.LOST, WorkerEvent.SERVING, WorkerEvent.REFUSED).epoch == 3
    assert play(WorkerEvent.STARTED, WorkerEvent.LOST).epoch == 1  # Nobody had answered.
    assert play(WorkerEvent.SERVING, WorkerEvent.SLEPT, WorkerEvent.WAKING, WorkerEvent.SERVING).epoch == 2


def test_doubt_is_ended_by_trust_and_not_by_words() -> None:
    life = play(WorkerEvent.SERVING, WorkerEvent.DOUBTED)
    assert life.state is WorkerState.SUSPECT
    life.on(WorkerEvent.SERVING, 9)
    assert life.state is WorkerState.SUSPECT
    life.on(WorkerEvent.TRUSTED, 9)
    assert life.is_ready
    assert life.epoch == 1


@pytest.mark.parametrize("event", [WorkerEvent.DOUBTED, WorkerEvent.TRUSTED])
def test_no_probe_makes_a_worker_ready_that_never_said_so(event: WorkerEvent) -> None:
    for before in (WorkerEvent.STARTED, WorkerEvent.LOADING, WorkerEvent.WARMING, WorkerEvent.REFUSED):
        assert not play(before, event).is_ready


class AnyLife(RuleBasedStateMachine):
    """Any order of events, as they race."""

    def __init__(self) -> None:
        super().__init__()
        self.life, self.now_ns = WorkerLife(0), 0
        self.serves = self.doubted = self.leaving = self.over = False

    @rule(event=st.sampled_from(WorkerEvent))
    def happens(self, event: WorkerEvent) -> None:
        self.now_ns += 1
        before, epoch = self.life.state, self.life.epoch
        changed = self.life.on(event, self.now_ns)
        assert changed == (self.life.state is not before)
        assert (self.life.since_ns == self.now_ns) == changed
        assert self.life.epoch - epoch == (
            changed and self.life.state in (WorkerState.STARTING, WorkerState.ASLEEP)
        )
        self.over |= event is WorkerEvent.END
        self.leaving |= event is WorkerEvent.DRAIN
        if event in (WorkerEvent.STARTED, WorkerEvent.LOST, WorkerEvent.REFUSED) or event in (
            WorkerEvent.LOADING,
            WorkerEvent.WARMING,
            WorkerEvent.SLEPT,
            WorkerEvent.WAKING,
        ):
            self.serves = self.doubted = False
        elif event is WorkerEvent.SERVING:
            self.serves = True
        elif event is WorkerEvent.DOUBTED:
            self.doubted |= self.serves
        elif event is WorkerEvent.TRUSTED:
            self.doubted = False

    @invariant()
    def only_what_serves_and_is_trusted_and_wanted_is_capacity(self) -> None:
        wanted = not (self.leaving or self.over)
        assert self.life.is_ready == (self.serves and not self.doubted and wanted)

    @invariant()
    def leaving_is_for_good(self) -> None:
        if self.over:
            assert self.life.state is WorkerState.GONE
        elif self.leaving:
            assert self.life.state is WorkerState.DRAINING
        else:
            assert self.life.state in UP


TestAnyLife = AnyLife.TestCase
