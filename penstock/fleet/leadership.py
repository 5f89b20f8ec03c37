"""One of several servers decides what all of them share: a lease in their store, fenced.

    free ──beat──> this server leads ──beat, beat, ...──> it ends, or loses its store ──> another one leads

Every half second a server says to the store that it is there (`beat`). The one that holds the lease gets
what the others have seen since, and their operators' orders, and leaves its state there; the others get that
state. So any of them goes on where the one before stopped.

Nothing is compared between clocks of two machines. How long a lease lasts is counted by the store; the
holder takes it to end a second sooner, counted from before it asked, by a clock that is never set. Dates
(rollouts' steps, an operator's order, the time of the day) are the store's for all. A server that slept
through its lease changes nothing: the store takes state only with the token of the lease that is in force,
every new holder's is larger, and what launchers change outside the store is marked with it
(fleet/launchers/kubernetes.py).
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from penstock.clock import NS_PER_S, NS_PER_US, Clock, sleep
from penstock.errors import ClientError, InvalidRequest, NotFound, Overloaded
from penstock.rng import IdSource
from penstock.telemetry.log import Log

BEAT_S, LEASE_S, MARGIN_S = 0.5, 5.0, 1.0
ANSWER_S = 1.8
"""An order waits so long for the leader: less than a gateway process waits for its parent."""
ANSWERS_MAX = 64
MESSAGES_MAX = 256
"""Of one server between two beats; of more the oldest are lost."""
_REFUSALS = {kind.__name__: kind for kind in (InvalidRequest, NotFound)}


class OrderMessage(msgspec.Struct, frozen=True, array_like=True):
    """From a server that follows to the one that leads."""

    kind: Literal["seen", "ask"]
    part: str
    who: str
    id: str
    body: bytes
    at_ns: int = 0
    """The store's date: an order for whose answer nobody waits any more is not carried out."""


class OrderAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of the one that leads, to an order; `kind` names the error that it is, empty: none."""

    id: str
    body: bytes = b""
    kind: str = ""
    words: str = ""
    param: str | None = None
    code: str | None = None


class LedState(msgspec.Struct, frozen=True, array_like=True):
    """The state that the leading server leaves in the store."""

    parts: Mapping[str, bytes]
    answers: tuple[OrderAnswer, ...]


class LeaseBeat(NamedTuple):
    """The store's answer."""

    token: int
    """Of the lease that is in force."""
    holder: str
    """The server that has it."""
    at_us: int
    """The store's date."""
    version: int
    state: bytes
    """Empty: it is that of the version which was known."""
    messages: Sequence[bytes]
    """For the one that leads."""


class BeatCall(NamedTuple):
    """A server's call to the store."""

    me: str
    led: int
    """The token with which it led until now; 0: it did not."""
    known: int
    """The largest token that it has heard of: a store that has lost its memory goes on above it."""
    version: int
    state: bytes
    messages: Sequence[bytes]


class LeaderStoreLost(Exception):
    """The store did not answer; a message that was sent may or may not have arrived."""


class LeaderStore(Protocol):
    """Where the lease is. An implementation translates; it decides nothing."""

    async def beat(self, call: "BeatCall") -> LeaseBeat:
        """Take or renew the lease for `LEASE_S`; then leave the state, if there is one and the lease had this
        token already, and take the messages; or, where another leads, leave the messages. Either way get the
        state, unless its version is known.

        Raises:
            LeaderStoreLost: it does not answer.
        """
        ...

    async def leave(self, me: str) -> None:
        """Give the lease back, if it is this server's. Raises as `beat` does."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class LedPart(Protocol):
    """A controller that acts on one server at a time."""

    def state(self) -> bytes:
        """All that another server needs to go on from here."""
        ...

    def adopt(self, state: bytes, *, leads: bool) -> None:
        """Another server has left this state; with `leads` it is this one's to go on with."""
        ...

    def seen(self) -> bytes:
        """News for the leading server since this was last asked; empty: none."""
        ...

    def hear(self, who: str, body: bytes) -> None:
        """Another server has seen this."""
        ...

    async def answer(self, body: bytes) -> bytes:
        """Carry out an order that another server got.

        Raises:
            ClientError: it is refused.
        """
        ...


class Leadership:
    """This server among those that share a store."""

    def __init__(self, store: LeaderStore, me: str, clock: Clock, log: Log) -> None:
        """`me` names this server for all time. Add `parts` before `start`."""
        self._store, self.me, self._clock, self._log = store, me, clock, log
        self.parts: dict[str, LedPart] = {}
        self.holder = ""
        """The server that leads, as far as is known."""
        self._token = self._until_ns = self._known = 0
        self._left = b""
        self._version: int = 0
        self._followed = b""
        """The last state of another server since this one followed."""
        self._offset_ns: int | None = None
        """The store's date less this clock's reading."""
        self._outbox: deque[bytes] = deque(maxlen=MESSAGES_MAX)
        self._answers: deque[OrderAnswer] = deque(maxlen=ANSWERS_MAX)
        self._waiting: dict[str, asyncio.Future[OrderAnswer]] = {}
        self._ids = IdSource()
        self._beating = asyncio.Lock()
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    @property
    def token(self) -> int:
        """Of the lease while this server leads; 0: it does not, or cannot be sure of it."""
        return self._token if self._clock.now_ns() < self._until_ns else 0

    def outrun(self, token: int) -> None:
        """Something bears a larger token than this server's: it does not lead, and will not with less."""
        self._known = max(self._known, token)
        self._until_ns = 0

    def wall_ns(self) -> int:
        """The date that all servers agree on: the store's."""
        if self._offset_ns is None:
            return self._clock.wall_ns()
        return self._clock.now_ns() + self._offset_ns

    async def start(self) -> None:
        """Begin to beat."""
        await self.beat()
        self._task = asyncio.create_task(self._run(), name="leadership")

    async def stop(self) -> None:
        """Leave the state for others, and the lease. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        await self.beat()
        self._until_ns = 0
        try:
            await self._store.leave(self.me)
        except LeaderStoreLost as error:  # The lease ends by itself.
            self._log.warning("the leader's lease could not be given back", error=error)
        await self._store.close()

    async def ask(self, part: str, body: bytes) -> bytes:
        """Have the server that leads carry out an order; this one follows.

        Raises:
            ClientError: it is refused.
            Overloaded: nobody leads, or the leader does not answer.
        """
        name = self._ids.take("ask")
        waiter = self._waiting[name] = asyncio.get_running_loop().create_future()
        message = _encode(OrderMessage("ask", part, self.me, name, body, self.wall_ns()))
        self._outbox.append(message)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.beat()
                answer = await waiter
        except TimeoutError:
            words = "The server that decides did not answer in time; try again."
            raise Overloaded(words, retry_after_s=LEASE_S) from None
        finally:
            del self._waiting[name]
            if message in self._outbox:
                self._outbox.remove(message)
        if answer.kind:
            kind = _REFUSALS.get(answer.kind, InvalidRequest)
            raise kind(answer.words, param=answer.param, code=answer.code)
        return answer.body

    async def beat(self) -> None:
        """Say that this server is there, and hand over what there is."""
        async with self._beating:
            try:
                await self._beat()
            except LeaderStoreLost as error:
                self._went_away("the store of the leader's lease does not answer", error)
            except msgspec.DecodeError as error:
                self._went_away("what the leader's lease has in its store is of another release", error)
            else:
                self._is_away = False

    def _went_away(self, words: str, error: Exception) -> None:
        if not self._is_away:
            self._log.warning(words, error=error)
        self._is_away = True

    async def _run(self) -> None:
        while True:
            await sleep(BEAT_S)
            try:
                await self.beat()
            except Exception as error:  # noqa: BLE001 - a part's bug must not end the beats.
                self._log.bug("a beat of the leader's lease failed", error)

    async def _beat(self) -> None:
        began_ns, led = self._clock.now_ns(), self.token
        state = self._state() if led else b""
        messages = [] if led else self._take_outbox()
        try:
            fresh = state if state != self._left else b""
            beat = await self._store.beat(BeatCall(self.me, led, self._known, self._version, fresh, messages))
        except (LeaderStoreLost, asyncio.CancelledError):
            self._outbox.extendleft(reversed(messages))
            raise
        self._offset_ns = beat.at_us * NS_PER_US - (began_ns + self._clock.now_ns()) // 2
        is_reported: bool = beat.version >= self._version  # Else the store has lost its memory.
        self._version, self.holder = beat.version, beat.holder
        self._known = max(self._known, beat.token)
        if beat.holder != self.me:
            self._follow(beat, led)
            return
        if beat.token != led:  # Another one may have led meanwhile.
            self._log.info("this server decides for all", token=beat.token)
            self._adopt(beat.state or self._followed, leads=True)
            self._followed = b""
        self._left = state if beat.token == led and is_reported else b""
        self._token, self._until_ns = beat.token, began_ns + int((LEASE_S - MARGIN_S) * NS_PER_S)
        for body in [*beat.messages, *messages]:
            await self._take(_messages.decode(body))

    def _follow(self, beat: LeaseBeat, led: int) -> None:
        self._token = self._until_ns = 0
        if led:
            self._log.warning("another server decides now", server=beat.holder)
        self._followed = beat.state or self._followed
        self._adopt(beat.state, leads=False)

    def _adopt(self, state: bytes, *, leads: bool) -> None:
        found = _states.decode(state) if state else LedState({}, ())
        for answer in found.answers:
            self._answered(answer)
        for name, part in self.parts.items():
            if leads or name in found.parts:
                part.adopt(found.parts.get(name, b""), leads=leads)

    def _state(self) -> bytes:
        parts = {name: part.state() for name, part in self.parts.items()}
        return _encode(LedState(parts, tuple(self._answers)))

    def _take_outbox(self) -> list[bytes]:
        for name, part in self.parts.items():
            if body := part.seen():
                self._outbox.append(_encode(OrderMessage("seen", name, self.me, "", body)))
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    async def _take(self, message: OrderMessage) -> None:
        if (part := self.parts.get(message.part)) is None:
            return
        if message.kind == "seen":
            part.hear(message.who, message.body)
            return
        if self.wall_ns() - message.at_ns > ANSWER_S * NS_PER_S:
            return
        try:
            answer = OrderAnswer(message.id, await part.answer(message.body))
        except ClientError as error:
            answer = OrderAnswer(message.id, b"", type(error).__name__, str(error), error.param, error.code)
        self._answers.append(answer)
        self._answered(answer)

    def _answered(self, answer: OrderAnswer) -> None:
        if (waiter := self._waiting.get(answer.id)) is not None and not waiter.done():
            waiter.set_result(answer)


_encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(OrderMessage)
_states = msgspec.msgpack.Decoder(LedState)
