"""What gateways and workers of a simulation say to each other."""

import msgspec

from penstock.errors import PenstockError
from penstock.sim.traffic.request import Segment
from penstock.types import RequestId, Usage


class Submission(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request as it is sent to a worker: what `protocol.worker.Submit` carries, with contents in place of
    tokens.
    """

    id: RequestId
    gateway: int
    attempt: int
    prompt: tuple[Segment, ...]
    answer: int
    """The content of the answer."""
    output_tokens: int
    """When the model stops by itself."""
    max_tokens: int
    num_resumed: int = 0
    """The first so many tokens of the answer were given by workers that are lost: it goes on behind them."""
    salt: bytes = b""
    adapter: str = ""
    public_tokens: int = 0
    priority: int = 0
    fairness_key: str = ""
    fairness_weight: float = 1.0
    poison: bool = False


class Began(msgspec.Struct, frozen=True, gc=False):
    """The answer's first token came."""

    id: RequestId
    attempt: int
    cached_tokens: int
    prefill_ns: int


class Sliced(msgspec.Struct, frozen=True, gc=False):
    """Another slice of the answer is full."""

    id: RequestId
    attempt: int
    num_tokens: int
    """All that there are by now."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The last word."""

    id: RequestId
    attempt: int
    reason: str
    usage: Usage
    error: str = ""


class Failed(msgspec.Struct, frozen=True):
    """The request was refused, or its worker is gone."""

    id: RequestId
    attempt: int
    error: PenstockError


WorkerMessage = Began | Sliced | Finished | Failed


class WorkerLoadReport(msgspec.Struct, frozen=True, gc=False):
    """What a worker says of itself: see `WorkerView`."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    rows_max: int
