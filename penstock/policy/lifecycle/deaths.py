"""Workers that died, and who was on board: told to the quarantine, which says who of them is not started again, and how the others are."""

from collections.abc import Iterator, Mapping

from penstock.errors import PenstockError, WorkerError
from penstock.policy.extras.quarantine import OnBoard
from penstock.policy.flow import State
from penstock.policy.lifecycle.life import Life
from penstock.policy.parts import Poison
from penstock.types import RequestId, Usage, WorkerId


class Deaths:
    """Those since `refused` was last asked."""

    __slots__ = ("_deaths", "_lives", "_poison")

    def __init__(self, poison: Poison, lives: Mapping[RequestId, Life]) -> None:
        """`lives` are all accepted requests, by reference."""
        self._poison, self._lives = poison, lives
        self._deaths: dict[WorkerId, tuple[int, list[OnBoard]]] = {}
        """When, and who was there."""

    def __len__(self) -> int:
        return len(self._deaths)

    def note(
        self,
        now_ns: int,
        worker: WorkerId,
        life: Life,
        error: PenstockError | None,
        usage: Usage | None = None,
    ) -> None:
        """A request was lost at a worker, if it is that: to `error`, after `usage`."""
        if not isinstance(error, WorkerError) or not error.died:
            return
        flow = life.flow
        given = flow.completion_tokens if usage is None else usage.completion_tokens
        is_starting = flow.state in (State.STARTED, State.RACING)
        _, on_board = self._deaths.setdefault(worker, (now_ns, []))
        on_board.append(OnBoard(flow.arrival, is_starting, given))

    def refused(self, now_ns: int) -> Iterator[tuple[Life, PenstockError]]:
        """Those that wait for another worker and do not get one; the others are started as their suspicion wants it."""
        deaths, self._deaths = self._deaths, {}
        poison = self._poison
        for at_ns, on_board in deaths.values():
            poison.died(at_ns, on_board)
        for arrival in (each.arrival for _, on_board in deaths.values() for each in on_board):
            life = self._lives.get(arrival.id)
            if life is None or life.flow.state is not State.QUEUED:
                continue
            if (error := poison.refusal(now_ns, arrival)) is not None:
                yield life, error
            else:
                life.lane.suspect(life.work, poison.trial(now_ns, arrival))
