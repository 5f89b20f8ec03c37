"""One rollout: from the first conversations to all of them, or back.

    running ──(every step's time is over, nothing is worse)──> ready ──promote──> promoted
       │  └──────────────────────── promotes by itself ─────────────────────────────^
       ├──(a metric is surely worse, or so much that nobody needs to be sure)──> rolled_back
       └──(an operator says so)───────> aborted

A step ends as soon as every metric is surely fine, or when its time is over, if nothing looks worse by then
and enough requests have ended; else it continues, and says what it waits for. A metric that is worse ends the
rollout at once, in any step. A version whose canary ends no more requests is not promoted by itself: its
workers may be gone, and then the baseline answers those conversations.

With shadow traffic there is a step before the first one: nobody has the new version, and it gets copies of
requests that the old one answers. Both answers count, as those of a canary and a control cohort do.
"""

import enum

import msgspec

from penstock.clock import NS_PER_S
from penstock.policy.rollout.cohorts import BUCKETS
from penstock.policy.rollout.evidence import Evidence, Observation, Reading, RolloutMetric, RolloutVerdict

STEPS_MAX = 20
SHADOW_STEP = -1
STEP_S_MAX = 7 * 24 * 3600.0
TENANTS_MAX = 1000
IDLE_S_MAX = 60.0
"""A canary that ended no request for longer is not promoted by itself."""


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's order."""

    model: str
    """The name without a version, by which clients ask."""
    candidate: str
    """The version that is tried: "name@2"."""
    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0)
    """Percent of conversations, growing; behind the last one come all."""
    step_s: float = 1800.0
    """The longest that a step takes, if nothing looks worse by then."""
    requests_min: int = 100
    """Of each cohort, in each step."""
    warm_up_requests: int = 50
    """Of the candidate, whose times do not count: its caches are cold. Its failures do."""
    tenants: tuple[str, ...] = ()
    """Tenants whose conversations are dealt: ids, or "tier:NAME" for all of a tier; none: all. With one step,
    and not promoted, it is an A/B test of these tenants."""
    shadow: float = 0.0
    """Percent of conversations whose requests are copied to the candidate before the first step; its answers
    are thrown away. 0: there is no such step."""
    promotes: bool = False
    """All conversations get it by themselves behind the last step, without a word from an operator."""

    def faults(self) -> str:
        """Its problems; empty: nothing."""
        if not self.steps or len(self.steps) > STEPS_MAX:
            return f"'steps' must be 1 to {STEPS_MAX} percentages"
        # Above a half there is no control cohort of the same size.
        if any(not 0.01 <= each <= 50 for each in self.steps) or list(self.steps) != sorted(set(self.steps)):
            return "'steps' must be growing percentages from 0.01 to 50"
        if not (self.shadow == 0 or 0.01 <= self.shadow <= 100):
            return "'shadow' must be 0 or a percentage from 0.01 to 100"
        if not 0 < self.step_s <= STEP_S_MAX:
            return f"'step_s' must be more than 0 and at most {STEP_S_MAX:.0f} seconds"
        if len(self.tenants) > TENANTS_MAX or any(not each for each in self.tenants):
            return f"'tenants' must be at most {TENANTS_MAX} names"
        if self.requests_min < 1 or self.warm_up_requests < 0:
            return "'requests_min' must be at least 1 and 'warm_up_requests' at least 0"
        return ""


class RolloutState(enum.StrEnum):
    """Where it stands."""

    RUNNING = "running"
    READY = "ready"
    """Every step is over: an operator promotes it."""
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"


_LIVE = (RolloutState.RUNNING, RolloutState.READY)


class Rollout(msgspec.Struct, kw_only=True):
    """Its state, as it is kept over a restart. Times are of the wall clock, in nanoseconds."""

    id: str
    """Deals conversations to buckets, too."""
    plan: RolloutPlan
    baseline: str
    """The version that is held against."""
    began_ns: int
    step_began_ns: int
    step: int = 0
    """Of the plan's; `SHADOW_STEP` comes before the first one."""
    state: RolloutState = RolloutState.RUNNING
    why: str = ""
    """Of a rollout that runs: what it waits for. Else why it ended so."""
    evidence: Evidence = msgspec.field(default_factory=Evidence)
    before: tuple[int, int] = (0, 0)
    """Requests of canary and control before this step."""
    canary_requests: int = 0
    """Of the canary, when it was judged last."""
    canary_ended_ns: int = 0
    """When it was first judged with so many."""

    @classmethod
    def begin(cls, rollout_id: str, plan: RolloutPlan, baseline: str, now_ns: int) -> "Rollout":
        """A new one, in its first step."""
        assert not plan.faults(), plan.faults()
        step = SHADOW_STEP if plan.shadow else 0
        return cls(
            id=rollout_id, plan=plan, baseline=baseline, began_ns=now_ns, step_began_ns=now_ns, step=step
        )

    @property
    def is_live(self) -> bool:
        """Whether it is not decided."""
        return self.state in _LIVE

    @property
    def is_shadowing(self) -> bool:
        """Whether nobody has the candidate yet, and it gets copies."""
        return self.is_live and self.step == SHADOW_STEP

    @property
    def share(self) -> int:
        """Buckets that have the candidate."""
        if self.is_live:
            return 0 if self.is_shadowing else round(self.plan.steps[self.step] * BUCKETS / 100)
        return BUCKETS if self.state is RolloutState.PROMOTED else 0

    @property
    def shadow(self) -> int:
        """Buckets whose requests are copied to the candidate."""
        return round(self.plan.shadow * BUCKETS / 100) if self.is_shadowing else 0

    def take(self, seen: Observation) -> None:
        """A request has ended."""
        if self.is_live:
            is_cold = self.evidence.requests(canary=True) < self.plan.warm_up_requests
            self.evidence.add(seen, only_failures=is_cold)

    def readings(self) -> list[Reading]:
        """Of every metric."""
        return [self.evidence.read(metric) for metric in self.evidence.metrics]

    def judge(self, now_ns: int) -> bool:
        """Decide what can be decided; whether the state or the step is another one now."""
        if not self.is_live:
            return False
        if (num_requests := self.evidence.requests(canary=True)) > self.canary_requests:
            self.canary_requests, self.canary_ended_ns = num_requests, now_ns
        if why := self.evidence.hard_stop():
            self._end(RolloutState.ROLLED_BACK, why)
            return True
        readings = self.readings()
        worse = [each for each in readings if each.verdict is RolloutVerdict.WORSE]
        if worse:
            self._end(RolloutState.ROLLED_BACK, "; ".join(map(_said, worse)))
            return True
        if self.state is RolloutState.READY:
            return False
        if lacks := self._lacks(now_ns, readings):
            self.why = lacks
            return False
        self.why = ""
        if self.step + 1 < len(self.plan.steps):
            self.step += 1
            self.step_began_ns = now_ns
            self.before = self._requests()
        elif self.plan.promotes:
            self._end(RolloutState.PROMOTED, "every step is over, and nothing is worse")
        else:
            self.state, self.why = RolloutState.READY, "every step is over: promote it"
        return True

    def promote(self) -> None:
        """All conversations get the candidate."""
        assert self.is_live, self.state
        self._end(RolloutState.PROMOTED, "an operator has promoted it")

    def abort(self, why: str) -> None:
        """All conversations get the baseline."""
        assert self.is_live or self.state is RolloutState.PROMOTED, self.state
        self._end(RolloutState.ABORTED, why)

    def _lacks(self, now_ns: int, readings: list[Reading]) -> str:
        """The evidence that the step waits for; empty: nothing."""
        canary, control = (now - before for now, before in zip(self._requests(), self.before, strict=True))
        wanted = self.plan.requests_min
        if min(canary, control) < wanted and self.is_shadowing:
            return f"{wanted} requests that the candidate had rows to spare for; there were {canary}"
        if min(canary, control) < wanted:
            return f"{wanted} requests of each cohort; the canary has {canary}, control {control}"
        idle_s = (now_ns - self.canary_ended_ns) / NS_PER_S
        if self.plan.promotes and self.step + 1 == len(self.plan.steps) and idle_s > IDLE_S_MAX:
            return f"requests of the canary; none for {idle_s:.0f} s"
        if all(each.verdict is RolloutVerdict.FINE for each in readings):
            return ""
        left_s = self.plan.step_s - (now_ns - self.step_began_ns) / NS_PER_S
        unsure = ", ".join(each.metric for each in readings if each.verdict is not RolloutVerdict.FINE)
        if left_s > 0:
            return f"certainty about {unsure}, for {left_s:.0f} s at most"
        unknown = [each.metric for each in readings if each.difference is None]
        if unknown:
            return f"more conversations, to say anything of {', '.join(unknown)}"
        looks_bad = [each for each in readings if abs(each.difference or 0.0) > each.margin and _is_bad(each)]
        if looks_bad:
            return f"more requests: {'; '.join(map(_said, looks_bad))}, which may be chance"
        return ""

    def _requests(self) -> tuple[int, int]:
        return self.evidence.requests(canary=True), self.evidence.requests(canary=False)

    def _end(self, state: RolloutState, why: str) -> None:
        self.state, self.why = state, why


def _is_bad(reading: Reading) -> bool:
    two_sided = reading.metric in (RolloutMetric.LENGTH, RolloutMetric.CUT_OFF)
    difference = reading.difference or 0.0
    return two_sided or (difference < 0 if reading.metric is RolloutMetric.SCORE else difference > 0)


def _said(reading: Reading) -> str:
    assert reading.difference is not None, reading
    assert reading.low is not None, reading
    assert reading.high is not None, reading
    return (
        f"{reading.metric} {reading.difference:+.1%} ({reading.low:+.1%} to {reading.high:+.1%}, "
        f"allowed {reading.margin:.1%})"
    )
