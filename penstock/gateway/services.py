"""What all endpoints share: models, limits, counters, and the set of replies that are running."""

from dataclasses import dataclass

from penstock.clock import Clock
from penstock.config.tree import Config
from penstock.errors import Draining, PenstockError
from penstock.gateway.models import ModelTable
from penstock.gateway.reply import Reply, StreamSlots
from penstock.gateway.tokenize_pool import TokenizePool
from penstock.rng import IdSource


class RunningReplies:
    """The replies that have not settled. Gives back their slots when they do."""

    def __init__(self, slots: StreamSlots) -> None:
        self._slots = slots
        self._replies: set[Reply] = set()

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        """A reply is about to start; its slots are taken already."""
        self._replies.add(reply)

    def began(self, reply: Reply) -> None:
        """Nothing follows from a first output."""

    def produced(self, reply: Reply) -> None:
        """Nobody asked for slices."""

    def broke(self, reply: Reply, error: PenstockError) -> bool:
        """There is one worker for each model: no other could be tried."""
        return False

    def settled(self, reply: Reply) -> None:
        """A reply is over."""
        self._replies.remove(reply)
        self._slots.give_back(reply.tally.num_choices)

    def heartbeat(self, ticks: int) -> None:
        """Let every reply that was silent for `ticks` calls show that it lives."""
        for reply in list(self._replies):
            reply.heartbeat(ticks)

    def fail_all(self, error: PenstockError) -> None:
        """End what is still running."""
        for reply in list(self._replies):
            reply.fail(error)


@dataclass(slots=True, kw_only=True)
class Services:
    """Handed to every endpoint."""

    config: Config
    models: ModelTable
    ids: IdSource
    clock: Clock
    slots: StreamSlots
    tokenize: TokenizePool
    replies: RunningReplies
    draining: bool = False

    def check_draining(self) -> None:
        """Refuse new work once the server is going away.

        Raises:
            Draining: it is.
        """
        if self.draining:
            raise Draining("The server is shutting down.")
