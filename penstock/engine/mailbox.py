"""What the socket thread tells the step thread, and the queue in between.

The queue needs no bound of its own: the server lets in at most `max_running + max_waiting` living requests,
and each can post at most one submission and one abort; a connection subscribes to KV events at most once.
Orders (adapters, sleep) come from operators, one by one.
"""

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from penstock.engine.adapters.manager import AdapterRead
from penstock.protocol.worker import Submit, WorkerOrder
from penstock.types import RequestId

ConnectionId = int
"""Counts up from 1 over the life of the process; never reused."""


@dataclass(slots=True, frozen=True)
class Submitted:
    """A gateway asks for a new request."""

    connection: ConnectionId
    submit: Submit
    arrived_ns: int
    grammar: object = None
    """What `submit.grammar` was compiled to, where it has one."""


@dataclass(slots=True, frozen=True)
class Aborted:
    """A gateway (or the loss of it) ends these requests."""

    connection: ConnectionId
    request_ids: tuple[RequestId, ...]


@dataclass(slots=True, frozen=True)
class DrainAsked:
    """Finish what runs, then exit."""


@dataclass(slots=True, frozen=True)
class KVEventsAsked:
    """A gateway wants to hear of KV events from this one on."""

    connection: ConnectionId
    epoch: int
    from_sequence: int


@dataclass(slots=True, frozen=True)
class Ordered:
    """A gateway wants an adapter to come, to go or to stay, or the weights to."""

    order: WorkerOrder


Mail = Submitted | Aborted | DrainAsked | KVEventsAsked | Ordered | AdapterRead


class Mailbox:
    """Many threads post; the step thread takes."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[Mail] = SimpleQueue()

    def post(self, mail: Mail) -> None:
        """Leave a message; never blocks."""
        self._queue.put(mail)

    def take(self, *, wait: bool, sleep_s: float | None = None) -> list[Mail]:
        """Everything there is now, in order. With `wait`, block (asleep) until there is something.

        With `sleep_s` too, for this long at most: then there may be nothing.
        """
        mail: list[Mail] = []
        try:
            if wait:
                mail.append(self._queue.get(timeout=sleep_s))
            while True:
                mail.append(self._queue.get_nowait())
        except Empty:
            return mail
