"""Messages between the gateway processes of one server and their parent, over a Unix socket.

    child                        parent
      |  Snapshot -->              |   when it listens, then every second
      |  Snapshot, Ask -->         |
      |                 <-- Sum    |   of the last snapshot of each, and of those who have ended
      |  Order, AdapterOrder -->   |   about a worker's service, or a model's adapters: the parent tells all
      |                 <-- Done   |
      |  SleepOrder -->            |   put a model to sleep, or wake it
      |          <-- SleepAnswer   |   any time later: it is done, or refused
      |  ServedTokens -->          |   five times a second, if anything was
      |         <-- ServedTokens   |   of another child
      |  EndedRequests, LatestRequests -->   every second, if any ended: their counts; the last ones
      |  Happened -->              |   for the audit trail
      |  ObservedRequests -->      |   every second, if any of a rollout ended
      |  RolloutAsk -->            |   an operator's order, or a question
      |            <-- RolloutAnswer   |
      |  ScaleQuestion -->         |   the same about the number of workers
      |            <-- RolloutAnswer   |
      |  LookAt -->                |   a view of what the parent remembers (telemetry/watch.py) ...
      |                 <-- View   |   ... as JSON

Framed like `worker.py`'s messages.
"""

import struct
from typing import Literal

import msgspec

from penstock.protocol.worker import FaultCount
from penstock.types import TenantId

EXIT_CANNOT_SERVE = 78
"""A child's exit code where starting again would fail the same way: EX_CONFIG of sysexits.h."""
_LENGTH = struct.Struct("<I")


class ModelNumbers(msgspec.Struct, frozen=True):
    """One model's, for `penstock top`."""

    waiting: int
    ttft_sum_s: float
    ttft_count: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """One process's numbers."""

    metrics: bytes
    """Its `/metrics` text."""
    connections: int
    streams: int
    models: dict[str, ModelNumbers] = {}
    gone: tuple[str, ...] = ()
    """Workers that were taken out of service by hand and that this process has no streams at any more."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """This process was asked for the sum of all."""


class Order(msgspec.Struct, frozen=True, tag="order"):
    """This process was ordered to take a worker out of service, or to bring it back."""

    worker: str
    timeout_s: float | None
    """How long its streams have; None: it comes back."""


class AdapterOrder(msgspec.Struct, frozen=True, tag="adapter"):
    """This process was ordered to load a model's adapter, or to unload it."""

    model: str
    name: str
    source: str
    """Its path and digest, as in the configuration; empty: it goes."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The order is on its way to every process."""


class SleepOrder(msgspec.Struct, frozen=True, tag="sleep_order"):
    """A model is to be woken, or put to sleep."""

    model: str
    wakes: bool


class SleepAnswer(msgspec.Struct, frozen=True, tag="sleep_answer"):
    """The result of a `SleepOrder`."""

    order: SleepOrder
    kind: str = ""
    """The type of the error (errors.py) if it could not be carried out."""
    words: str = ""


class ServedTokens(msgspec.Struct, frozen=True, tag="served"):
    """The service of tenants by one process, since its last report: other processes count it as well."""

    units: tuple[tuple[str, int, TenantId, int], ...]
    """Model, band by its place in the configuration, tenant, and what its counter grew by
    (schedule/fair_share.py)."""


class EndedRequests(msgspec.Struct, frozen=True, tag="ended"):
    """The requests that ended in one process since its last report."""

    body: bytes
    """As `telemetry.counts.Book` encodes it."""


class LatestRequests(msgspec.Struct, frozen=True, tag="latest"):
    """The last requests that ended in one process since it last said so, for people who look."""

    body: bytes
    """As `gateway.api.services` encodes them."""


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """Something for the audit trail."""

    body: bytes
    """JSON of a `telemetry.audit.AuditEvent`."""


class ObservedRequests(msgspec.Struct, frozen=True, tag="observed"):
    """Requests of rollouts that ended in one process since it last said so."""

    body: bytes
    """Msgpack of `policy.rollout.evidence.Observation`s."""


class RolloutAsk(msgspec.Struct, frozen=True, tag="rollout_ask"):
    """An operator told this process what to do with a rollout, or asks how they are."""

    body: bytes
    """JSON of a `fleet.rollouts.RolloutOrder`."""


class ScaleQuestion(msgspec.Struct, frozen=True, tag="scale"):
    """An operator told this process how many workers a model is to have, or asks how many it has."""

    body: bytes
    """JSON of a `fleet.scale_report.ScaleAsk`."""


class RolloutAnswer(msgspec.Struct, frozen=True, tag="rollout_answer"):
    """The result of it."""

    body: bytes = b""
    """JSON of `fleet.rollouts.RolloutReports`, or of `fleet.scale_report.ScaleReports`."""
    kind: str = ""
    """The type of the error (errors.py) if it was refused; likewise below."""
    words: str = ""
    param: str | None = None
    code: str | None = None


class LookAt(msgspec.Struct, frozen=True, tag="look_at"):
    """This process was asked for something that the parent remembers."""

    view: Literal["history", "alerts", "audit", "log", "requests"]
    seconds: int = 0
    """How far back."""
    about: str = ""
    """Which worker; or which kind of events, empty: all."""
    before: int = 0
    """Events older than the one of this number; 0: the last ones. Requests that ended after the one of it."""
    limit: int = 0


class View(msgspec.Struct, frozen=True, tag="view"):
    """The answer to it."""

    body: bytes
    """JSON."""


class Sum(msgspec.Struct, frozen=True, kw_only=True, tag="sum"):
    """The numbers of all processes."""

    metrics: bytes
    connections: int
    streams: int
    processes: int
    models: dict[str, ModelNumbers] = {}
    gone: tuple[str, ...] = ()
    """Workers that were taken out of service and that no process has streams at any more."""


class LaunchNote(msgspec.Struct, frozen=True):
    """Something that happened to a worker's process, as the parent saw it."""

    text: str
    at_ns: int
    """By the wall clock."""


class WorkerAt(msgspec.Struct, frozen=True):
    """A worker that the parent has launched."""

    id: str
    route: str
    """Its model."""
    address: str
    restarts: int = 0
    notes: tuple[LaunchNote, ...] = ()
    stage: str = ""
    """The parent's description of a process that is not ready."""
    is_down: bool = False
    """It will not be started again."""
    faults: dict[str, FaultCount] = {}
    """By kind."""


class ChildLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's first message to a new gateway process: one line of JSON on its standard input, which then
    stays open.
    """

    index: int
    """From 0; a process that replaces another has its index."""
    config: bytes
    """The whole configuration as JSON, keys included: this is why it does not come as an argument."""
    listeners: tuple[int, ...]
    """File descriptors of listening sockets."""
    workers: tuple[WorkerAt, ...]
    """The workers that the parent has launched. Those at addresses are in the configuration."""
    parent: str
    """Path of the parent's Unix socket."""
    leases: str = ""
    """Path of the socket where the parent leases rate limits; empty: they are shared elsewhere."""
    hash_key: bytes
    """The key by which those workers name their KV blocks."""
    held: dict[str, float] = {}
    """Workers that are out of service by hand, and how many seconds their streams were given."""
    adapters: dict[str, dict[str, str]] = {}
    """By model the adapters that operators have loaded, by name their `AdapterOrder.source`."""
    rollouts: bytes = b"[]"
    """JSON of `fleet.rollouts.ActiveRollout`s."""
    to_come: dict[str, float] = {}
    """Models that have no worker and get one when somebody asks, and how many seconds that takes."""
    is_patient: bool = False
    """It waits for its workers before it accepts: others do meanwhile."""


class StopOrder(msgspec.Struct, frozen=True):
    """How a gateway process is to stop: see `Gateway.stop`."""

    lameduck_s: float = 0.0
    listens: bool = False
    is_hurried: bool = False
    """At once; it may have been told to stop before."""


class ChildReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parent's messages to a running gateway process: a line of JSON."""

    config: bytes = b""
    """A whole new configuration; empty: the old one stays."""
    workers: tuple[WorkerAt, ...] | None = None
    """All workers that the parent has launched and does not end; None: no news."""
    held: dict[str, float] | None = None
    """All workers that are out of service by hand; None: no news."""
    adapters: dict[str, dict[str, str]] | None = None
    """All adapters that operators have loaded or unloaded; None: no news."""
    rollouts: bytes | None = None
    """JSON of all active rollouts, as in `ChildLaunch`; None: no news."""
    to_come: dict[str, float] | None = None
    """As in `ChildLaunch`; None: no news."""
    stop: StopOrder | None = None
    """Stop; None: continue."""


ToParent = (
    Snapshot | Ask | Order | AdapterOrder | SleepOrder | ServedTokens | EndedRequests | LatestRequests
    | Happened | LookAt | ObservedRequests | RolloutAsk | ScaleQuestion
)  # fmt: skip
ToChild = Sum | Done | SleepAnswer | ServedTokens | View | RolloutAnswer

_to_parent = msgspec.msgpack.Decoder(ToParent)
_to_child = msgspec.msgpack.Decoder(ToChild)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToParent | ToChild) -> bytes:
    """One message as a whole frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_to_parent(body: bytes) -> ToParent:
    """Read what a child sent.

    Raises:
        msgspec.DecodeError: it is no such message.
    """
    return _to_parent.decode(body)


def decode_to_child(body: bytes) -> ToChild:
    """Read what the parent sent.

    Raises:
        msgspec.DecodeError: it is no such message.
    """
    return _to_child.decode(body)
