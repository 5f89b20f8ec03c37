"""How requests end, as `FlowControl` answers it; the other answers are in answers.py, which knows no
`Request`.
"""

import msgspec

from penstock.errors import PenstockError
from penstock.policy.answers import Abort, FallBack, GiveUp, Start
from penstock.policy.record import Outcome
from penstock.policy.requests.request import Request
from penstock.types import RequestId, WorkerId


class Settled(msgspec.Struct, frozen=True):
    """The one end of an accepted request. `request.record(wall_ns)` has the facts for the ledger."""

    id: RequestId
    outcome: Outcome
    request: Request


class Evict(msgspec.Struct, frozen=True):
    """Drop it, with this error to its client.

    If it only waited, `settled` is its end. If it runs on `worker_id`, abort it there and tell `ended`.
    """

    id: RequestId
    reason: str
    """"timeout" and "late" (waited too long), "no_worker", "queue_full", "memory", "quarantine", "drain"."""
    error: PenstockError
    worker_id: WorkerId | None = None
    settled: Settled | None = None


Action = Start | Abort | Evict | FallBack | GiveUp
"""What `dispatch` answers."""
