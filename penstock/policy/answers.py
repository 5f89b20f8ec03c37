"""What `FlowControl` answers: one struct for each thing that its driver must do."""

import msgspec

from penstock.errors import PenstockError
from penstock.policy.admit_facts import DowngradeReason
from penstock.types import RequestId, WorkerId


class Queued(msgspec.Struct, frozen=True, gc=False):
    """The request is accepted: exactly one `Settled` will follow. Call `dispatch` now."""

    id: RequestId
    route: str
    predicted_ns: int = 0
    """Its expected time to first token; 0 where nobody predicts."""


class Refused(msgspec.Struct, frozen=True):
    """It is not: nothing of it is left. The error has the message, and when to come back."""

    id: RequestId
    reason: str
    """The part that refused it, for metrics: "draining", "quarantine", "no_worker", "admission", "limits",
    "budget", "queue"."""
    error: PenstockError


class Diverted(msgspec.Struct, frozen=True):
    """It should arrive again at another model, with its prompt made anew for that one.

    Nothing of it is left.
    """

    id: RequestId
    route: str
    why: DowngradeReason


class Start(msgspec.Struct, frozen=True, gc=False):
    """Send it to this worker now."""

    id: RequestId
    route: str
    worker_id: WorkerId
    priority: int
    """The band's order: what the engine's own queue goes by."""
    attempt: int
    takes_row: bool = False
    """Its tenant runs nothing else of the model: our engine lets it have a row of another one."""
    beside: bool = False
    """The attempt before it runs on: tell `won` which of them has output first, or `lost` which of them
    failed."""


class Abort(msgspec.Struct, frozen=True, gc=False):
    """Stop it on its worker; tell `ended` when the worker's last word has come."""

    id: RequestId
    worker_id: WorkerId
    attempt: int = 0
    """Of two attempts the one that is dropped: it holds nothing any more, and nothing that it says counts. 0:
    all there is."""


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A budget is used up: end the answer here with this finish reason, abort it, and tell `ended`."""

    id: RequestId
    worker_id: WorkerId
    finish_reason: str = "budget"


class GiveUp(msgspec.Struct, frozen=True):
    """Its attempt takes too long, and the request can go on elsewhere: end that attempt as failed."""

    id: RequestId
    error: PenstockError


class FallBack(msgspec.Struct, frozen=True, gc=False):
    """It waits for a model that has no worker any more, and another model could answer: make its prompt anew
    for that one, and `move` it. Until then, or if that is refused, it waits on.
    """

    id: RequestId
    route: str
    why: DowngradeReason


class Requeued(msgspec.Struct, frozen=True, gc=False):
    """It waits again, for another attempt. Call `dispatch` now."""

    id: RequestId
    attempts: int
    migrates: bool = False
    """It goes on behind what it has given, and does not begin anew."""
