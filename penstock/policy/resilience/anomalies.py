"""The measures against a worker that computes wrongly (probes.py) or slowly (slowness.py).

    WELL ──FLAG──> DOUBTED ──CONFIRM──> EJECTED ──RELEASE──> RETURNING ──CLEAR──> WELL
      ^──── CLEAR ────┘                    ^───── CONFIRM ──────┘

A worker in doubt gets half of its share and is probed at once. A sign that confirms the doubt ejects it: it
is given nothing new, its streams continue on others as far as these can take them, and probes still reach it.
Of a model's ready workers one in five may be out (one at least where there are three or more); who is due and
may not go stays in doubt, and counts as found all the same. A wrong answer goes before a slow one. A worker
that was slow comes back after a while, twice as long each time; who was wrong, after right answers. Both
begin with half of their share.

Pure: facts and time come in, changes and workers to be probed go out. Gateway and simulator carry them out.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.clock import NS_PER_S
from penstock.policy.resilience.probes import Goldens, ProbeAnswer
from penstock.policy.resilience.slowness import WINDOW_NS, Peers
from penstock.schedule.step_time import StepSums
from penstock.types import WorkerId

EJECTED_SHARE = 0.2
READY_MIN = 3
"""With fewer ready workers none is ejected."""
QUIET_WINDOWS = 6
"""So many in a row in which it was as fast as its peers end a doubt."""
PROBE_REST = 50
"""So many times what a probe took pass before the next one: a slow machine is not kept busy by them."""
RIGHT_ANSWERS = 3
"""So many in a row let a worker that was wrong return."""
OUT_NS, OUT_MAX_NS = 120 * NS_PER_S, 3600 * NS_PER_S
"""How long a slow worker is out: the first time, and at most."""
Cause = Literal["slow", "wrong"]


class Standing(enum.StrEnum):
    """The work that a worker gets. The values are what people see."""

    WELL = "well"
    DOUBTED = "doubted"
    EJECTED = "ejected"
    RETURNING = "returning"


class Sign(enum.Enum):
    """The sign that moves it."""

    FLAG = "flag"
    CONFIRM = "confirm"
    CLEAR = "clear"
    RELEASE = "release"


_S, _G = Standing, Sign
TABLE: dict[tuple[Standing, Sign], Standing] = {
    (_S.WELL, _G.FLAG): _S.DOUBTED,
    (_S.DOUBTED, _G.CONFIRM): _S.EJECTED,
    (_S.DOUBTED, _G.CLEAR): _S.WELL,
    (_S.EJECTED, _G.RELEASE): _S.RETURNING,
    (_S.RETURNING, _G.CONFIRM): _S.EJECTED,
    (_S.RETURNING, _G.CLEAR): _S.WELL,
}
"""(standing, sign) -> next standing. A pair that is not here does not happen."""
WEIGHTS = {_S.WELL: 1.0, _S.DOUBTED: 0.5, _S.EJECTED: 0.0, _S.RETURNING: 0.5}


@dataclass(slots=True, frozen=True)
class StandingChange:
    """A worker's standing is another one."""

    route: str
    worker: WorkerId
    standing: Standing
    cause: Cause
    why: str


@dataclass(slots=True)
class Watched:
    """The facts of one worker. For others to read."""

    route: str
    group: str
    """The group that its speed is compared with."""
    identity: str
    """Empty: there is nothing to hold an answer against, so a probe only takes its time."""
    epoch: int
    is_ready: bool
    beats: int
    """Between two probes; 0: it is not probed."""
    standing: Standing = Standing.WELL
    cause: Cause = "slow"
    why: str = ""
    is_certain: bool = False
    """Its doubt is confirmed, whether or not it could be ejected."""
    since_ns: int = 0
    out_ns: int = 0
    """How long it is out this time, or was the last time; 0: it never was."""
    num_right: int = 0
    """Right answers in a row."""
    probe_due_ns: int = 0
    probe_began_ns: int = 0
    is_probing: bool = False
    answer: ProbeAnswer | None = None
    """Its last one."""
    distance: float = 0.0
    """How far that is from the golden one, in nats."""
    verdict: str = ""
    """Of the last probe: right, wrong, answered (with nothing to hold it against), or in words why there is
    none; empty before the first."""


class Anomalies:
    """One for a gateway."""

    def __init__(self, beat_ns: int) -> None:
        """`beat_ns`: between two probes of a worker; 0: nothing is probed, and nothing is judged."""
        assert beat_ns >= 0, beat_ns
        self._beat_ns = beat_ns
        self._workers: dict[WorkerId, Watched] = {}
        self._groups: dict[str, Peers] = {}
        self._goldens = Goldens()
        self._window_ns = 0
        self._changes: list[StandingChange] = []

    # --- facts ---------------------------------------------------------------------------------------

    def worker(
        self,
        now_ns: int,
        route: str,
        worker_id: WorkerId,
        *,
        ready: bool,
        epoch: int = 0,
        identity: str = "",
        kind: str = "",
        beats: int = 1,
    ) -> None:
        """A worker is ready, or is not. In another epoch it is a new process, of which nothing is known.
        `beats` are between two probes of it; 0: it is not probed.
        """
        found = self._workers.get(worker_id)
        if found is not None and (found.epoch, found.identity) == (epoch, identity):
            if ready and not found.is_ready:
                found.probe_due_ns = now_ns + beats * self._beat_ns
            found.is_ready = ready
            return
        if found is not None:
            self.gone(worker_id)
        group = f"{route}\0{kind}\0{identity}"
        self._workers[worker_id] = Watched(
            route, group, identity, epoch, ready, beats, probe_due_ns=now_ns + beats * self._beat_ns
        )

    def gone(self, worker_id: WorkerId) -> None:
        """It is no more."""
        found = self._workers.pop(worker_id, None)
        if found is not None:
            self._goldens.forget(found.identity, worker_id)
            if (peers := self._groups.get(found.group)) is not None:
                peers.forget(worker_id)

    def stepped(self, worker_id: WorkerId, sums: tuple[int, int, int, int, int, int]) -> None:
        """The work that it has computed since its start: steps, tokens, sequences, KV tokens read, pairs,
        nanoseconds (`StepSums`).
        """
        found = self._workers.get(worker_id)
        if found is not None and found.is_ready and self._beat_ns and sums[0]:
            self._groups.setdefault(found.group, Peers()).received(worker_id, StepSums(*sums))

    def probed(
        self, now_ns: int, worker_id: WorkerId, answer: ProbeAnswer | None, *, fault: str = "", why: str = ""
    ) -> str:
        """A probe is over: its answer, or the engine's `fault`, or `why` nothing can be said. Returns the
        verdict.
        """
        found = self._workers.get(worker_id)
        if found is None:
            return "gone"
        assert answer is None or not (fault or why), "a probe ends in one way"
        took_ns = now_ns - found.probe_began_ns if found.is_probing else 0
        found.is_probing = False
        found.probe_due_ns = now_ns + max(found.beats * self._beat_ns, PROBE_REST * took_ns)
        if not found.identity:
            found.answer = answer or found.answer
            found.verdict = "answered" if answer is not None else fault or why or "no answer"
        elif answer is not None:
            peers = (
                each for each in self._workers.values() if each.is_ready and each.identity == found.identity
            )
            num_peers = max(1, sum(1 for _ in peers))
            right, found.distance = self._goldens.judge(found.identity, worker_id, answer, num_peers)
            found.answer = answer
            if right is None:
                found.verdict = "undecided"
            elif right:
                self._right(now_ns, worker_id, found)
            else:
                why = f"log-probabilities are {found.distance:.3g} from the golden answer's"
                self._wrong(now_ns, worker_id, found, why)
        elif fault:
            self._wrong(now_ns, worker_id, found, f"the probe failed: {fault}")
        else:
            found.verdict = why or "no answer"
        return found.verdict

    # --- decisions -----------------------------------------------------------------------------------

    def due(self, now_ns: int) -> list[WorkerId]:
        """Workers to be probed now. Each counts as under way until it is `probed`."""
        if not self._beat_ns:
            return []
        found = [
            worker_id
            for worker_id, each in self._workers.items()
            if each.beats and each.is_ready and not each.is_probing and now_ns >= each.probe_due_ns
        ]
        for worker_id in found:
            self._workers[worker_id].is_probing = True
            self._workers[worker_id].probe_began_ns = now_ns
        return found

    def tick(self, now_ns: int) -> list[StandingChange]:
        """The changes since the last call. Every second or so."""
        if not self._window_ns:
            self._window_ns = now_ns + WINDOW_NS
        if now_ns >= self._window_ns:
            self._window_ns = now_ns + WINDOW_NS
            for peers in self._groups.values():
                for worker_id in peers.judge():
                    self._slow(now_ns, worker_id, peers)
        for worker_id, each in self._workers.items():
            if each.cause == "slow":
                self._rest(now_ns, worker_id, each)
            if each.is_certain and each.standing is Standing.DOUBTED:
                self._eject(now_ns, worker_id, each)
        self._call_back(now_ns)
        changes, self._changes = self._changes, []
        return changes

    def weight(self, worker_id: WorkerId) -> float:
        """The share of its capacity that it is given: 1, a half, or 0."""
        found = self._workers.get(worker_id)
        return 1.0 if found is None else WEIGHTS[found.standing]

    def get(self, worker_id: WorkerId) -> Watched | None:
        """The facts of one worker, if it is known."""
        return self._workers.get(worker_id)

    def slowness(self, worker_id: WorkerId) -> float | None:
        """How many times as long as its peers' its steps take; None: not known."""
        found = self._workers.get(worker_id)
        peers = self._groups.get(found.group) if found is not None else None
        return None if peers is None else peers.slowness(worker_id)

    def certain(self) -> Iterator[tuple[str, Cause]]:
        """Model and cause of each worker whose doubt is confirmed."""
        for each in self._workers.values():
            if each.is_certain:
                yield each.route, each.cause

    def ejected(self) -> Iterator[tuple[WorkerId, Cause]]:
        """Workers that are out, and why."""
        for worker_id, each in self._workers.items():
            if each.standing is Standing.EJECTED:
                yield worker_id, each.cause

    # --- inside --------------------------------------------------------------------------------------

    def _right(self, now_ns: int, worker_id: WorkerId, found: Watched) -> None:
        found.verdict = "right"
        found.num_right += 1
        if found.cause != "wrong":
            return
        if found.standing in (Standing.DOUBTED, Standing.RETURNING):
            self._move(now_ns, worker_id, found, Sign.CLEAR, "its probes are right")
        elif found.standing is Standing.EJECTED and found.num_right >= RIGHT_ANSWERS:
            self._move(now_ns, worker_id, found, Sign.RELEASE, "its probes are right again")

    def _wrong(self, now_ns: int, worker_id: WorkerId, found: Watched, why: str) -> None:
        found.verdict, found.num_right = "wrong", 0
        if found.standing is Standing.WELL or found.cause != "wrong":
            if found.standing is not Standing.EJECTED:
                found.probe_due_ns = now_ns
            self._flag(now_ns, worker_id, found, "wrong", why)
            return
        found.why = why
        if found.standing is not Standing.EJECTED:
            found.is_certain = True
            self._eject(now_ns, worker_id, found)

    def _slow(self, now_ns: int, worker_id: WorkerId, peers: Peers) -> None:
        found = self._workers[worker_id]
        why = f"its steps take {peers.slowness(worker_id) or 1.0:.2f} times as long as its peers'"
        if found.standing is Standing.WELL:
            self._flag(now_ns, worker_id, found, "slow", why)
            found.probe_due_ns = now_ns
        elif found.cause == "slow" and found.standing is not Standing.EJECTED:
            found.is_certain, found.why = True, why
            self._eject(now_ns, worker_id, found)

    def _flag(self, now_ns: int, worker_id: WorkerId, found: Watched, cause: Cause, why: str) -> None:
        if cause != found.cause and found.standing is not Standing.EJECTED:
            found.is_certain = False  # A doubt of another kind is not confirmed yet.
        found.cause = cause
        if found.standing is Standing.WELL:
            if now_ns - found.since_ns > OUT_MAX_NS:
                found.out_ns = 0
            self._move(now_ns, worker_id, found, Sign.FLAG, why)
        found.why = why

    def _rest(self, now_ns: int, worker_id: WorkerId, found: Watched) -> None:
        """Let time pass for a worker that is or was slow."""
        if found.standing is Standing.EJECTED and now_ns - found.since_ns >= found.out_ns:
            self._move(now_ns, worker_id, found, Sign.RELEASE, "it was out for long enough")
        elif found.standing in (Standing.DOUBTED, Standing.RETURNING):
            peers = self._groups.get(found.group)
            was_long = now_ns - found.since_ns >= QUIET_WINDOWS * WINDOW_NS
            if was_long and peers is not None and peers.num_quiet(worker_id) >= QUIET_WINDOWS:
                self._move(now_ns, worker_id, found, Sign.CLEAR, "it is as fast as its peers")
            elif now_ns - found.since_ns >= OUT_MAX_NS:  # Without load or peers there are no windows.
                self._move(now_ns, worker_id, found, Sign.CLEAR, "nothing has confirmed it")

    def _out(self, route: str) -> tuple[list[tuple[WorkerId, Watched]], int]:
        """Ready workers of a route that are out, and how many may be."""
        pool = [(w, each) for w, each in self._workers.items() if each.route == route and each.is_ready]
        allowed = max(1, int(EJECTED_SHARE * len(pool))) if len(pool) >= READY_MIN else 0
        return [(w, each) for w, each in pool if each.standing is Standing.EJECTED], allowed

    def _call_back(self, now_ns: int) -> None:
        """Let workers return where others have left and too few remain; slow ones first."""
        for route in {each.route for each in self._workers.values() if each.standing is Standing.EJECTED}:
            out, allowed = self._out(route)
            out.sort(key=lambda found: found[1].cause == "wrong")
            for worker_id, each in out[: max(0, len(out) - allowed)]:
                self._move(now_ns, worker_id, each, Sign.RELEASE, "too few others are ready")

    def _eject(self, now_ns: int, worker_id: WorkerId, found: Watched) -> None:
        """Take it out, if one more may be out."""
        assert found.is_certain, "a doubt is confirmed first"
        out, allowed = self._out(found.route)
        num_out = len(out)
        if num_out >= allowed > 0 and found.cause == "wrong":
            for other_id, other in out:
                if other.cause == "slow":
                    self._move(now_ns, other_id, other, Sign.RELEASE, f"{worker_id} is out in its place")
                    num_out -= 1
                    break
        assert num_out >= 0, num_out
        if num_out < allowed:
            found.out_ns = min(OUT_MAX_NS, 2 * found.out_ns) if found.out_ns else OUT_NS
            self._move(now_ns, worker_id, found, Sign.CONFIRM, found.why)

    def _move(self, now_ns: int, worker_id: WorkerId, found: Watched, sign: Sign, why: str) -> None:
        assert (found.standing, sign) in TABLE, f"{worker_id} is {found.standing} and has no {sign.value}"
        found.standing = TABLE[found.standing, sign]
        found.since_ns, found.why = now_ns, why
        if found.standing is not Standing.EJECTED:
            found.is_certain = False
        if found.standing is Standing.WELL:
            found.num_right = 0
        if (peers := self._groups.get(found.group)) is not None:
            peers.trust(worker_id, trusted=found.standing is Standing.WELL)
        self._changes.append(StandingChange(found.route, worker_id, found.standing, found.cause, why))
