"""Requests that kill workers: found by who was there, refused for a while, so that one bad prompt does not
take a fleet down.

When a worker crashes, every request on it gets a strike, and most were only there. They are tried again so
that the next crash says more: each that had given nothing since it was started there starts alone, on a
worker where no other suspect is starting, and so does each that is there at a second crash; streams that were
cut continue at once, together, but not beside those (policy/queueing/model_queue.py, until their next
output). If exactly one suspect was starting when a worker crashed, that is the cause; if none was, and
exactly one is there, that one is. With `quarantine_crashes` strikes it is convicted: it is not started again,
and its like is refused until `refuse_s` have passed. No other request is blamed for that crash. So a prompt
that ends whatever computes it takes two workers, in any crowd; one that ends them in the middle of its answer
takes three. (Group testing, after Dorfman, "The Detection of Defective Members of Large Populations", 1943,
with the first crowd as the pool.)

A request that ends well is exonerated, and so is one that has come `progress_tokens` further than where the
last worker crashed. Crashes within `together_ms` may have one cause outside, such as a machine with several
workers: they count once.

Requests are known by the fingerprint of their prompt, which also names tenant and model. `Quarantine` holds
what is known of them; `CrashQuarantine` hangs it on the lives of requests: it reports which requests a
crashed worker had, and asks which of them may start again, and where. Pure; bounded; time is handed in.
"""

import enum
import hashlib
import math
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.branch import extended
from penstock.config.fleet import HealthConfig
from penstock.errors import CrashingRequest, PenstockError, WorkerError
from penstock.policy.extras.hooks import Extra
from penstock.policy.flow import RequestFacts, State
from penstock.policy.request import Request
from penstock.types import RequestId, Usage, WorkerId

Fingerprint = int


class InFlightAtCrash(msgspec.Struct, frozen=True, gc=False):
    """A request at the crash of its worker."""

    facts: RequestFacts
    is_starting: bool
    """It had given nothing since it was started there."""
    num_tokens: int = 0
    """The tokens that it has given in all."""


class IsolatedRetry(enum.Enum):
    """How a suspect is started again."""

    ALONE = "alone"
    """Where no other suspect is starting."""
    TOGETHER = "together"
    """Where no request is starting alone."""


class _Suspect(msgspec.Struct):
    strikes: int = 0
    """Worker crashes that it was present at."""
    starts: int = 0
    """Of those, the ones where it was starting."""
    num_tokens: int = 0
    """The tokens that it had given at the last one."""
    last_ns: int = 0
    """When that was."""
    until_ns: int = 0
    """When all of this is forgotten."""
    is_blocked: bool = False


class QuarantineTerms(HealthConfig, frozen=True, kw_only=True):
    """The treatment of a request whose worker crashes, again and again."""

    quarantine_crashes: int = 2
    """Worker crashes that a request was present at, the last of them as the likeliest cause, before it is
    refused."""
    progress_tokens: int = 16
    """A request that has given so many more tokens than at the last crash has shown that it was not the cause
    of that."""
    together_ms: int = 10
    """Crashes so close to each other may have one cause outside, such as a machine with several workers: they
    count once."""
    refuse_s: float = 600.0
    """For so long."""
    suspects_max: int = 10_000
    """Prompts that are remembered; the least recent is forgotten first."""


class Quarantine:
    """One for a gateway."""

    __slots__ = ("_config", "_suspects", "num_blocked")

    def __init__(self, config: HealthConfig) -> None:
        self._config = extended(config, QuarantineTerms)
        self._suspects: dict[Fingerprint, _Suspect] = {}  # Least recently struck first.
        self.num_blocked = 0
        """Convictions so far."""

    def refusal(self, now_ns: int, facts: RequestFacts) -> CrashingRequest | None:
        """Why a request is refused; None if it is not. Looks at the prompt only while there are suspects."""
        if not self._suspects or (name := fingerprint(facts)) is None:
            return None
        left_s = self.refused_s(now_ns, name)
        if not left_s:
            return None
        return CrashingRequest(
            f"Workers have ended while they computed this prompt. It is refused for another "
            f"{math.ceil(left_s)} s."
        )

    def trial(self, now_ns: int, facts: RequestFacts) -> IsolatedRetry | None:
        """How a request is started if it is under suspicion; None if it is not."""
        if not self._suspects or (name := fingerprint(facts)) is None:
            return None
        return self.trial_of(now_ns, name)

    def died(self, now_ns: int, in_flight_at_crash: Sequence[InFlightAtCrash]) -> None:
        """A worker's process ended, with these requests on it."""
        starting, streaming = list[Fingerprint](), dict[Fingerprint, int]()
        for each in in_flight_at_crash:
            if (name := fingerprint(each.facts)) is None:
                continue
            if each.is_starting:
                starting.append(name)
            streaming[name] = max(streaming.get(name, 0), each.num_tokens)
        self.strike(now_ns, starting, streaming)

    def ended_well(self, facts: RequestFacts) -> None:
        """The request was none of these."""
        if self._suspects and (name := fingerprint(facts)) is not None:
            self.clear(name)

    # --- by fingerprint ------------------------------------------------------------------------------

    def strike(
        self,
        now_ns: int,
        starting: Iterable[Fingerprint],
        given: Mapping[Fingerprint, int] | None = None,
    ) -> None:
        """A worker crashed, with these requests on it: those that were starting, and what everybody had given
        in tokens (0 of whom is not named).
        """
        tokens = dict.fromkeys(starting, 0)
        fresh = frozenset(tokens)
        tokens |= given or {}
        before = {name: self._before(now_ns, name, tokens[name]) for name in sorted(tokens)}
        cause = _cause(before, fresh)
        if cause is not None and self._blame(now_ns, before[cause]):
            before = {cause: before[cause]}  # The others were only there.
        for name, suspect in before.items():
            self._suspects.pop(name, None)
            self._suspects[name] = suspect
            self._count(now_ns, suspect, is_starting=name in fresh, num_tokens=tokens[name])
        assert fresh <= tokens.keys(), "those that were starting were on board"
        while len(self._suspects) > self._config.suspects_max:
            del self._suspects[next(iter(self._suspects))]

    def clear(self, fingerprint: Fingerprint) -> None:
        """It was none of these."""
        self._suspects.pop(fingerprint, None)

    def refused_s(self, now_ns: int, fingerprint: Fingerprint) -> float:
        """For how many seconds a request is refused; 0: it is not."""
        suspect = self._suspects.get(fingerprint)
        if suspect is None or not suspect.is_blocked or now_ns >= suspect.until_ns:
            return 0.0
        return (suspect.until_ns - now_ns) / NS_PER_S

    def trial_of(self, now_ns: int, fingerprint: Fingerprint) -> IsolatedRetry | None:
        """How it is tried again; None if nothing is held against it."""
        suspect = self._suspects.get(fingerprint)
        if suspect is None or now_ns >= suspect.until_ns:
            return None
        return IsolatedRetry.ALONE if suspect.starts or suspect.strikes > 1 else IsolatedRetry.TOGETHER

    def _before(self, now_ns: int, name: Fingerprint, num_tokens: int) -> _Suspect:
        """The evidence against it from earlier crashes; nothing of one that has come further since."""
        suspect = self._suspects.get(name)
        if suspect is None or now_ns >= suspect.until_ns:
            return _Suspect()
        if num_tokens > suspect.num_tokens + self._config.progress_tokens and not suspect.is_blocked:
            return _Suspect()
        return suspect

    def _is_same_cause(self, now_ns: int, suspect: _Suspect) -> bool:
        return suspect.strikes > 0 and now_ns - suspect.last_ns < self._config.together_ms * NS_PER_MS

    def _blame(self, now_ns: int, suspect: _Suspect) -> bool:
        """Convict the likeliest cause if this was one crash too many; whether it is convicted."""
        if suspect.is_blocked:
            return True
        if self._is_same_cause(now_ns, suspect) or suspect.strikes + 1 < self._config.quarantine_crashes:
            return False
        suspect.is_blocked = True
        self.num_blocked += 1
        return True

    def _count(self, now_ns: int, suspect: _Suspect, *, is_starting: bool, num_tokens: int) -> None:
        if not self._is_same_cause(now_ns, suspect):
            suspect.strikes += 1
            suspect.last_ns = now_ns
            suspect.starts += is_starting
        elif is_starting:
            suspect.starts = max(suspect.starts, 1)
        assert 0 <= suspect.starts <= suspect.strikes, "it was present where it was starting"
        suspect.num_tokens = num_tokens
        suspect.until_ns = now_ns + round(self._config.refuse_s * NS_PER_S)


def _cause(
    in_flight_at_crash: Mapping[Fingerprint, _Suspect], starting: Container[Fingerprint]
) -> Fingerprint | None:
    """The request that a crash is put down to, by what is known from earlier ones; None if that could be
    several.
    """
    if len(in_flight_at_crash) == 1:
        return next(iter(in_flight_at_crash))
    suspects = [name for name, suspect in in_flight_at_crash.items() if suspect.strikes]
    likely = [name for name in suspects if name in starting] or suspects
    return likely[0] if len(likely) == 1 else None


def fingerprint(facts: RequestFacts) -> Fingerprint | None:
    """Names model, tenant and prompts; None if the prompts are unknown.

    One tenant's suspects are never another's.
    """
    if not facts.prompts:
        return None
    hasher = hashlib.blake2b(f"{facts.route}\0{facts.tenant.id}".encode(), digest_size=8)
    for prompt in facts.prompts:
        tokens = array("i", prompt).tobytes()
        hasher.update(len(tokens).to_bytes(8, "little") + tokens)
    return int.from_bytes(hasher.digest(), "little")


_NOWHERE = frozenset[WorkerId]()


@dataclass(slots=True)
class _Tried:
    """An accepted request under suspicion that has given nothing since."""

    route: str
    trial: IsolatedRetry
    worker: WorkerId | None = None
    """Where it is starting; None while it waits."""


class CrashQuarantine(Extra):
    """Between flow control and `Quarantine`. Fulfils `contracts.IsolatedStarts` for the queues."""

    __slots__ = ("_apart", "_crashes", "_quarantine")

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self._apart: dict[RequestId, _Tried] = {}
        self._crashes: dict[WorkerId, tuple[int, list[tuple[Request, InFlightAtCrash]]]] = {}
        """Those since `evictions` was last called: when, and which requests were there."""

    def refusal(self, now_ns: int, facts: RequestFacts) -> PenstockError | None:
        """See `Extra`."""
        return self._quarantine.refusal(now_ns, facts)

    def queued(self, now_ns: int, request: Request) -> None:
        """See `Extra`: a suspect is started as the quarantine says."""
        assert request.state is State.QUEUED, f"{request.id} does not wait"
        if (trial := self._quarantine.trial(now_ns, request.facts)) is not None:
            self._apart[request.id] = _Tried(request.model_queue.route, trial)

    def started(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        if (tried := self._apart.get(request.id)) is None:
            return
        assert request.worker not in self.barred(tried.route, request.id), "a suspect is not alone"
        tried.worker = request.worker

    def first_output(self, now_ns: int, request: Request) -> None:
        """See `Extra`."""
        self._apart.pop(request.id, None)

    def left(self, request: Request) -> None:
        """See `Extra`."""
        self._apart.pop(request.id, None)

    def attempt_lost(
        self,
        now_ns: int,
        request: Request,
        worker: WorkerId,
        error: PenstockError | None,
        usage: Usage | None,
    ) -> None:
        """See `Extra`."""
        if (tried := self._apart.get(request.id)) is not None:
            tried.worker = None
        if not isinstance(error, WorkerError) or not error.died:
            return
        given = request.completion_tokens if usage is None else usage.completion_tokens
        _, in_flight_at_crash = self._crashes.setdefault(worker, (now_ns, []))
        found = InFlightAtCrash(request.facts, is_starting=request.state is State.STARTED, num_tokens=given)
        in_flight_at_crash.append((request, found))

    def finished(self, facts: RequestFacts) -> None:
        """See `Extra`."""
        self._quarantine.ended_well(facts)

    def evictions(self, now_ns: int) -> Iterable[tuple[Request, str, PenstockError]]:
        """See `Extra`: a request that crashed a worker is not sent to the next one."""
        return self._judge(now_ns) if self._crashes else ()

    def _judge(self, now_ns: int) -> Iterator[tuple[Request, str, PenstockError]]:
        crashes, self._crashes = self._crashes, {}
        for at_ns, in_flight_at_crash in crashes.values():
            self._quarantine.died(at_ns, [found for _, found in in_flight_at_crash])
        for request in [
            request for _, in_flight_at_crash in crashes.values() for request, _ in in_flight_at_crash
        ]:
            if request.state is not State.QUEUED:
                continue
            if (error := self._quarantine.refusal(now_ns, request.facts)) is not None:
                yield request, "quarantine", error
            else:
                self.queued(now_ns, request)

    # --- for the queues ---------------------------------------------------------------------------

    def is_apart(self, request_id: RequestId) -> bool:
        """See `IsolatedStarts`."""
        return request_id in self._apart

    def barred(self, route: str, request_id: RequestId) -> frozenset[WorkerId]:
        """See `IsolatedStarts`: one that must be alone shares a worker with no other."""
        if (tried := self._apart.get(request_id)) is None:
            return _NOWHERE
        others = [each for key, each in self._apart.items() if key != request_id and each.route == route]
        if tried.trial is not IsolatedRetry.ALONE:
            others = [each for each in others if each.trial is IsolatedRetry.ALONE]
        return frozenset(each.worker for each in others if each.worker is not None)

    def taken(self, route: str) -> frozenset[WorkerId]:
        """See `IsolatedStarts`."""
        here = (each.worker for each in self._apart.values() if each.route == route)
        return frozenset(worker for worker in here if worker is not None)
