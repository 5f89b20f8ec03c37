"""The common context of all streams of one worker that is not ours, and what they tell its backend."""

from typing import NamedTuple, Protocol

from penstock.backends.base import Finish
from penstock.backends.http.chunks import Holes
from penstock.backends.http.terms import Anomaly, HttpLimits
from penstock.clock import Clock
from penstock.text.detokenizer import PieceTokens
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId


class LeavingStream(Protocol):
    """A stream that is over."""

    @property
    def request_id(self) -> RequestId:
        """Of its request."""
        ...


class StreamOwner(Protocol):
    """The backend that a stream belongs to."""

    def leave(self, stream: "LeavingStream", finish: Finish) -> None:
        """A stream is over; called once, before its sink hears of it."""
        ...

    def noted(self, anomaly: Anomaly, detail: str) -> None:
        """Something was odd."""
        ...

    def lost(self, why: str, *, unreachable: bool) -> None:
        """The worker cannot be reached, or else closed a stream's connection in the middle of its answer."""
        ...


class StreamContext(NamedTuple):
    """The common context of all streams of one worker."""

    tokenizer: Tokenizer
    pieces: PieceTokens
    holes: Holes
    clock: Clock
    owner: StreamOwner
    limits: HttpLimits
