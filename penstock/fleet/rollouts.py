"""Carries rollouts out: takes operators' orders, hears what became of requests, decides every second, tells
gateways who gets which version, and keeps all of it in a file.

One for each server: in the gateway that is alone, or in the parent of several gateway processes. Of servers
that share a store one decides (leadership.py): the others tell it what became of their requests, pass their
orders on, and deal as it says. While nobody can be sure to lead, versions stay as they are dealt. Each
decision that the evidence made is in the audit trail and, with that evidence, in a file from which it can be
made again; orders are in the audit trail alone. So is the end of a rollout of a version that has gone from
the configuration while the server was down: the old version serves on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from penstock.clock import Clock, sleep
from penstock.config.tree import Config
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.kept_file import KeptFile, RecordFile, lines_of
from penstock.fleet.leadership import MESSAGES_MAX, Leadership
from penstock.policy.rollout.cohorts import BUCKETS, GROUPS, bucket_of
from penstock.policy.rollout.dealing import ActiveRollout, active_of
from penstock.policy.rollout.evidence import Observation, Reading
from penstock.policy.rollout.rollout import Rollout, RolloutPlan, RolloutState
from penstock.telemetry.audit import Notes
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log
from penstock.types import without_version

JUDGE_S = 1.0
KEPT_MAX = 100
"""Rollouts; of more the oldest are forgotten, but of each model the latest is kept: it says what serves."""
PART = "rollouts"
_UNTOLD_MAX = 20 * MESSAGES_MAX
"""Requests that the leading server is yet to hear of; of more the newest are left out."""


class ProbeScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's own probe of one version: how good its answer was."""

    version: str
    probe: str
    """Names the question: the same of both versions are compared."""
    score: Annotated[float, msgspec.Meta(ge=0, le=1)]


class RolloutOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operator's order; `by` is the id of the key."""

    verb: Literal["show", "start", "promote", "abort", "score"] = "show"
    model: str = ""
    plan: RolloutPlan | None = None
    score: "ProbeScore | None" = None
    by: str = ""


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, as operators see it."""

    id: str
    model: str
    baseline: str
    candidate: str
    state: RolloutState
    why: str
    percent: float
    """Of conversations that have the candidate now."""
    step: int
    """-1: shadow traffic, before the first one."""
    steps: tuple[float, ...]
    shadow: float
    """Percent of conversations whose requests are copied to the candidate now."""
    began_ms: int
    step_began_ms: int
    promotes: bool
    metrics: list[Reading]
    trouble: str = ""
    """Why the candidate can take no requests now; empty: it can, or the rollout is decided."""


class RolloutReports(msgspec.Struct, frozen=True):
    """`GET /admin/rollouts`: the latest of each model first."""

    rollouts: list[RolloutReport]


class RolloutDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the record: something was decided."""

    wall_ns: int
    before: Rollout
    """With the evidence that it was decided by."""
    state: RolloutState
    step: int
    why: str


_decisions = msgspec.json.Decoder(RolloutDecision)


def replay(path: Path) -> Iterator[tuple[int, RolloutDecision, Rollout | None]]:
    """Make every decision of a record again: its line, and where the rollout is then, if that differs; None:
    it does not.

    Raises:
        OSError: it cannot be read.
        msgspec.DecodeError: a line is not of such a file.
    """
    for number, text in lines_of(path):
        made = _decisions.decode(text)
        again = copy(made.before)
        again.judge(made.wall_ns)
        same = (again.state, again.step, again.why) == (made.state, made.step, made.why)
        yield number, made, None if same else again


def rollouts_file(config: Config) -> Path | None:
    """Where they are kept: beside the ledger; None: an operator who keeps no records does not want these."""
    return ledger_directory(config.ledger) / "rollouts.json" if config.ledger.enabled else None


class RolloutLeader:
    """See the module. `publish` hands gateways what is active."""

    def __init__(
        self,
        versions: Callable[[], Collection[str]],
        clock: Clock,
        log: Log,
        notes: Notes,
        *,
        path: Path | None,
        publish: Callable[[Sequence[ActiveRollout]], None],
        new_id: Callable[[], str],
        leadership: Leadership | None = None,
    ) -> None:
        """`versions` are the names of all models, the one that stands first before the others; without `path`
        a restart forgets; without `leadership` this server decides alone.
        """
        self._versions, self._clock, self._log, self._notes = versions, clock, log, notes
        self._publish, self._new_id, self._leadership = publish, new_id, leadership
        self._file = KeptFile(path, "rollouts", log)
        record = None if path is None else path.with_name("rollout-decisions.jsonl")
        self._record = RecordFile(record, "rollouts", log)
        self._rollouts: deque[Rollout] = deque()  # The oldest first.
        self._untold: list[Observation] = []
        self._task: asyncio.Task[None] | None = None
        if leadership is not None:
            leadership.parts[PART] = self

    async def start(self) -> None:
        """Take over what is in the file, and begin to decide."""
        await self._load()
        self._tell()
        self._task = asyncio.create_task(self._run(), name="rollouts")

    async def stop(self) -> None:
        """Keep what is known."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._save()

    @property
    def _leads(self) -> bool:
        return self._leadership is None or self._leadership.token > 0

    def _wall_ns(self) -> int:
        """The date: of the store, where several servers share one."""
        return self._clock.wall_ns() if self._leadership is None else self._leadership.wall_ns()

    def active(self) -> list[ActiveRollout]:
        """The rollouts that gateways need to know: of each model the latest rollout, unless it was taken
        back.
        """
        found = map(active_of, self._latest().values())
        return [each for each in found if each is not None]

    def take(self, seen: Sequence[Observation]) -> None:
        """Requests have ended."""
        if not self._leads:
            self._untold += seen[: _UNTOLD_MAX - len(self._untold)]
            return
        live = {each.id: each for each in self._rollouts if each.is_live}
        for each in seen:
            if (rollout := live.get(each.rollout)) is not None:
                rollout.take(each)

    async def order(self, order: RolloutOrder) -> RolloutReports:
        """Carry out what an operator wants, and say how things are then.

        Raises:
            InvalidRequest: the plan contradicts itself, or what runs.
            NotFound: there is no such model, version or rollout.
            Overloaded: another server decides, and does not answer.
        """
        if order.verb != "show" and self._leadership is not None and not self._leads:
            answer = await self._leadership.ask(PART, _encoder.encode(order))
            return msgspec.json.decode(answer, type=RolloutReports)
        if order.verb == "start":
            self._begin(order)
        elif order.score is not None:
            self._score(order.model, order.score)
        elif order.verb != "show":
            self._end(order)
        if order.verb != "show":
            self._tell()
            await self._save()
        now = [_report(each) for each in reversed(self._rollouts) if order.model in ("", each.plan.model)]
        return RolloutReports(now)

    def _begin(self, order: RolloutOrder) -> None:
        plan = order.plan
        assert plan is not None, "the endpoint has read it"
        if fault := plan.faults():
            raise InvalidRequest(f"Invalid rollout: {fault}.", code="invalid_value")
        names = [name for name in self._versions() if without_version(name) == plan.model != name]
        if plan.candidate not in names:
            known = ", ".join(f"'{name}'" for name in names) or "none"
            raise NotFound(
                f"The model '{plan.model[:64]}' has no version '{plan.candidate[:64]}'. It has {known}.",
                param="candidate",
                code="model_not_found",
            )
        last = self._latest().get(plan.model)
        if last is not None and last.is_live:
            raise InvalidRequest(
                f"A rollout of '{plan.model}' to '{last.plan.candidate}' runs. Promote or abort it first.",
                param="model",
            )
        serves = last.plan.candidate if last is not None and last.share else names[0]
        if serves == plan.candidate:
            raise InvalidRequest(
                f"'{plan.candidate}' serves '{plan.model}' already.", param="candidate", code="invalid_value"
            )
        now_ns = self._wall_ns()
        self._rollouts.append(Rollout.begin(self._new_id(), plan, serves, now_ns))
        self._note("rollout begins", self._rollouts[-1], order.by)
        self._forget_old()

    def _end(self, order: RolloutOrder) -> None:
        rollout = self._latest().get(order.model)
        if rollout is None or not (rollout.is_live or rollout.share):
            raise NotFound(f"There is no rollout of '{order.model[:64]}'.", param="model")
        if order.verb == "abort":
            rollout.abort("an operator has ended it")
            self._note("rollout aborted", rollout, order.by)
            return
        if not rollout.is_live:
            raise InvalidRequest(f"'{rollout.plan.candidate}' is promoted already.", param="model")
        rollout.promote()
        self._note("rollout promoted", rollout, order.by)

    def _score(self, model: str, score: ProbeScore) -> None:
        rollout = self._latest().get(model)
        if rollout is None or not rollout.is_live:
            raise NotFound(f"There is no rollout of '{model[:64]}'.", param="model")
        versions = (rollout.baseline, rollout.plan.candidate)
        if score.version not in versions:
            raise InvalidRequest(
                f"Invalid 'version': expected '{versions[0]}' or '{versions[1]}'.", param="version",
                code="invalid_value",
            )  # fmt: skip
        group = bucket_of(rollout.id, score.probe) % GROUPS
        is_canary = score.version == rollout.plan.candidate
        rollout.take(Observation(rollout.id, is_canary=is_canary, group=group, score=score.score))

    async def _run(self) -> None:
        while True:
            await sleep(JUDGE_S)
            if not self._leads:
                continue
            changed = False
            for each in self._rollouts:
                before, now_ns = copy(each), self._wall_ns()
                if each.judge(now_ns):
                    changed = True
                    self._note(_WORDS[each.state] if each.step == before.step else "rollout goes on", each)
                    made = RolloutDecision(
                        wall_ns=now_ns, before=before, state=each.state, step=each.step, why=each.why
                    )
                    self._record.add(_encoder.encode(made))
            if changed:
                self._tell()
                await self._save()

    def _tell(self) -> None:
        self._publish(self.active())

    def _note(self, what: str, rollout: Rollout, by: str = "") -> None:
        gets = f"{rollout.share * 100 / BUCKETS:g} % of conversations get it"
        if rollout.is_shadowing:
            gets = f"it gets copies of {rollout.plan.shadow:g} % of conversations"
        why = rollout.why or gets
        about = f"{rollout.baseline} -> {rollout.plan.candidate}"
        self._notes.note("admin" if by else "server", what, about, why=why, by=by)
        self._log.info(what, rollout=about, why=why)

    def _latest(self) -> dict[str, Rollout]:
        """By model."""
        return {each.plan.model: each for each in self._rollouts}

    def _forget_old(self) -> None:
        latest = self._latest().values()
        old = [each for each in self._rollouts if not any(each is kept for kept in latest)]
        for each in old[: max(0, len(self._rollouts) - KEPT_MAX)]:
            self._rollouts.remove(each)

    # --- several servers ----------------------------------------------------------------------------

    def state(self) -> bytes:
        """See `LedPart`."""
        return _encoder.encode(list(self._rollouts))

    def adopt(self, state: bytes, *, leads: bool) -> None:
        """See `LedPart`."""
        del leads  # Either way this is how things are.
        if not state:
            return
        self._rollouts = deque(_decoder.decode(state))
        self._tell()

    def seen(self) -> bytes:
        """See `LedPart`."""
        unreported, self._untold = self._untold, []
        return _encoder.encode(unreported) if unreported else b""

    def hear(self, who: str, body: bytes) -> None:
        """See `LedPart`."""
        del who
        self.take(msgspec.json.decode(body, type=list[Observation]))

    async def answer(self, body: bytes) -> bytes:
        """See `LedPart`."""
        return _encoder.encode(await self.order(msgspec.json.decode(body, type=RolloutOrder)))

    # --- over a restart -----------------------------------------------------------------------------

    async def _load(self) -> None:
        if not (body := await self._file.load()):
            return
        try:
            self._rollouts = deque(_decoder.decode(body))
        except msgspec.DecodeError as error:
            self._file.damaged(error)
            return
        names = set(self._versions())
        for each in self._latest().values():
            gone = {each.plan.candidate, each.baseline} - names
            is_active = each.is_live or each.share
            if is_active and (each.plan.candidate in gone or (gone and each.is_live)):
                each.abort(f"the configuration has no {', '.join(sorted(gone))} any more")
                self._note("rollout aborted", each)

    async def _save(self) -> None:
        if self._record.has_changes:
            await asyncio.to_thread(self._record.write)
        if self._rollouts or self._file.is_there:
            await self._file.save(_encoder.encode(list(self._rollouts)))


_WORDS: Mapping[RolloutState, str] = {
    RolloutState.RUNNING: "rollout goes on",
    RolloutState.READY: "rollout waits to be promoted",
    RolloutState.PROMOTED: "rollout promoted",
    RolloutState.ROLLED_BACK: "rollout taken back",
    RolloutState.ABORTED: "rollout aborted",
}
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[Rollout])


def _report(rollout: Rollout) -> RolloutReport:
    return RolloutReport(
        id=rollout.id,
        model=rollout.plan.model,
        baseline=rollout.baseline,
        candidate=rollout.plan.candidate,
        state=rollout.state,
        why=rollout.why,
        percent=rollout.share * 100 / BUCKETS,
        step=rollout.step,
        steps=rollout.plan.steps,
        shadow=rollout.shadow * 100 / BUCKETS,
        began_ms=rollout.began_ns // 1_000_000,
        step_began_ms=rollout.step_began_ns // 1_000_000,
        promotes=rollout.plan.promotes,
        metrics=rollout.readings(),
    )
