"""Capacity as it is reported: to operators (`GET` and `POST /admin/scale`), and to a file from which every
decision can be made again.

The file has a line of JSON for each decision, with all that it was made from. It begins, for each model, with
the configuration and the state before its first decision. From there on the same signals give the same
decisions, on any machine: `replay` holds them against each other.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_MS
from penstock.config.scale import ScaleConfig
from penstock.fleet.kept_file import RecordFile, lines_of
from penstock.policy.capacity.autoscaler import Autoscaler, ScaleBudget, ScaleDecision, ScaleState
from penstock.policy.capacity.signals import Override, Signals
from penstock.telemetry.log import Log


class TrailBegin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The state before a model's first decision in the file."""

    model: str
    scale: ScaleConfig
    state: msgspec.Raw
    """JSON of a `ScaleState`."""


class TrailLine(msgspec.Struct, frozen=True, kw_only=True, tag="decision"):
    """One decision."""

    seen: Signals
    budget: ScaleBudget
    decision: ScaleDecision


_lines = msgspec.json.Decoder(TrailBegin | TrailLine)
_states = msgspec.json.Decoder(ScaleState)
_encode = msgspec.json.Encoder().encode


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that comes out otherwise than it is on record."""

    recorded: ScaleDecision
    again: ScaleDecision


class Trail:
    """Writes the file. All but `write` belong to the owner's event loop."""

    def __init__(self, path: Path | None, log: Log) -> None:
        """Without `path` nothing is kept."""
        self._file = RecordFile(path, "capacity", log)
        self._begun: set[str] = set()

    def begin(self, scaler: Autoscaler) -> None:
        """Before a decision: where it begins, if the file does not have that yet."""
        if self._file.is_kept and scaler.model not in self._begun:
            self._begun.add(scaler.model)
            state = msgspec.Raw(_encode(scaler.state))
            self._file.add(_encode(TrailBegin(model=scaler.model, scale=scaler.scale, state=state)))

    def restart(self, model: str) -> None:
        """The model's state is another one now."""
        self._begun.discard(model)

    def keep(self, seen: Signals, budget: ScaleBudget, decision: ScaleDecision) -> None:
        """It was decided."""
        if self._file.is_kept:
            self._file.add(_encode(TrailLine(seen=seen, budget=budget, decision=decision)))

    @property
    def has_changes(self) -> bool:
        """Whether there is something to write."""
        return self._file.has_changes

    def write(self) -> None:
        """Write down what is kept. Blocks on the disk."""
        if self._file.write():
            self._begun.clear()


def replay(path: Path) -> Iterator[tuple[int, Difference | None]]:
    """Make every decision of a file again: its line, and how it differs from the record; None: it does not.

    Raises:
        OSError: it cannot be read.
        msgspec.DecodeError: a line is not of such a file.
    """
    scalers: dict[str, Autoscaler] = {}
    for number, text in lines_of(path):
        line = _lines.decode(text)
        if isinstance(line, TrailBegin):
            state = _states.decode(line.state)
            scalers[line.model] = Autoscaler(line.model, line.scale, state)
        elif (scaler := scalers.get(line.decision.model)) is not None:
            again = scaler.decide(line.seen, line.budget)
            same = again == line.decision
            yield number, None if same else Difference(recorded=line.decision, again=again)


class ScaleOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/scale`: so many workers for so long, whatever the load; without `workers` the load decides
    again.
    """

    model: str = ""
    workers: int | None = None
    for_s: float = 3600.0


class ScaleAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A question or an order, from a gateway process to the one that decides; `by` is the id of the key."""

    model: str = ""
    order: ScaleOrder | None = None
    by: str = ""


class ScalePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One look, for a plot."""

    at_ms: int
    ready: int
    pending: int
    workers: int
    """That there were to be from then on."""
    rate: float
    """Work per second that came (tokens, of which generated ones count four times)."""
    forecast: float
    safe_rate: float
    waiting: int
    late: int
    due: int
    shed: int


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pool now."""

    name: str
    ready: int
    pending: int
    draining: int
    asleep: int
    workers: int
    """That there are to be."""
    max: int
    spot: bool
    price: float
    trouble: str


class ScaleReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as operators see it."""

    model: str
    mode: str
    min: int
    max: int
    standby: int
    workers: int
    ready: int
    pools: list[PoolReport]
    leads: bool = True
    """This server decides: always for workers that it launches, for those of a cluster while it has the
    leader's lease."""
    leader: str = ""
    """The server that has it, if several share the model's workers."""
    override: Override | None
    decision: ScaleDecision | None
    """The last one; None: there was none yet."""
    signals: Signals | None
    """The facts that it was made from."""
    moves: list[ScaleDecision]
    """The last ones that changed something, or would have; the newest first."""
    points: list[ScalePoint]
    """The last quarter of an hour, the oldest first."""


class ScaleReports(msgspec.Struct, frozen=True):
    """`GET /admin/scale`."""

    models: list[ScaleReport]


def point_of(seen: Signals, decision: ScaleDecision) -> ScalePoint:
    """One look, for a plot."""
    return ScalePoint(
        at_ms=seen.wall_ns // NS_PER_MS,
        ready=seen.ready,
        pending=seen.pending,
        workers=decision.workers,
        rate=decision.rate,
        forecast=decision.forecast,
        safe_rate=decision.safe_rate,
        waiting=seen.waiting,
        late=seen.late,
        due=seen.due,
        shed=seen.shed,
    )
