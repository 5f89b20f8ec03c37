"""One model route in virtual time: workers with slots, a serial prefill each, streams of random lengths.

It drives `Admission` and `WaitModel` as a gateway does: facts when a request comes, a sample when its first token does.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.admit import Admission
from penstock.policy.admit_facts import Admit, AdmitFacts, Candidate, Decision, Shed
from penstock.policy.tenant import Tenant
from penstock.policy.wait_time import Load, Sample, WaitModel
from penstock.rng import stream
from penstock.types import TenantId


@dataclass(slots=True)
class Call:
    """One request of the trace, and what became of it."""

    number: int
    at_ns: int
    prompt_tokens: int
    decode_ns: int
    tenant: str = "t"
    load: Load | None = None
    predicted_ns: int = 0
    ttft_ns: int = 0
    tries: int = 0
    answer: Decision | None = None


@dataclass(slots=True)
class TimedRoute:
    """`slots` streams at once on one worker that computes prompts one after the other."""

    admission: Admission | None
    waits: WaitModel
    slots: int = 8
    token_ns: int = 20_000
    fixed_ns: int = 5 * NS_PER_MS
    name: str = "large"
    queue_wait_max_ns: int = 0
    now_ns: int = 0
    retries: bool = False
    """Refused clients come back once, when they were told to."""
    waiting: deque[Call] = field(default_factory=deque)
    running: list[tuple[int, int]] = field(default_factory=list)
    events: list[tuple[int, int, str, Call]] = field(default_factory=list)
    prefill_free_ns: int = 0
    served: list[Call] = field(default_factory=list)
    refused: list[Call] = field(default_factory=list)

    def run(self, calls: list[Call]) -> None:
        """Play a trace to its end."""
        for call in calls:
            heapq.heappush(self.events, (call.at_ns, call.number, "come", call))
        while self.events:
            self.now_ns, _, kind, call = heapq.heappop(self.events)
            if kind == "come":
                self._come(call)
            elif kind == "first":
                self._first(call)
            else:
                self.running.remove((self.now_ns, call.number))
                self.waits.stream_ended("w", call.decode_ns + self._prefill_ns(call))
            self._start()

    def _come(self, call: Call) -> None:
        call.tries += 1
        load = call.load = self._load(call)
        if self.admission is not None:
            tenant = Tenant(id=TenantId(call.tenant), degrade="never")
            facts = AdmitFacts(
                tenant=tenant,
                queue_wait_max_ns=self.queue_wait_max_ns,
                requested=Candidate(
                    model=self.name,
                    ready=1,
                    waiting=len(self.waiting),
                    load=load,
                    context_tokens=call.prompt_tokens,
                ),
            )
            call.answer = self.admission.decide(self.now_ns, facts)
            if isinstance(call.answer, Shed):
                self.refused.append(call)
                if self.retries and call.tries == 1:
                    again = self.now_ns + -(-call.answer.retry_after_ns // NS_PER_S) * NS_PER_S
                    heapq.heappush(self.events, (again, call.number, "come", call))
                return
            assert isinstance(call.answer, Admit)
            call.predicted_ns = call.answer.predicted_ns
        call.at_ns = self.now_ns
        self.waiting.append(call)

    def _load(self, call: Call) -> Load:
        computing = max(0, self.prefill_free_ns - self.now_ns) // self.token_ns
        return Load(
            prompt_tokens=call.prompt_tokens,
            tokens_ahead=sum(other.prompt_tokens for other in self.waiting) + computing,
            requests_ahead=len(self.waiting),
            running=len(self.running),
            slots=self.slots,
        )

    def _prefill_ns(self, call: Call) -> int:
        return self.fixed_ns + self.token_ns * call.prompt_tokens

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            call = self.waiting.popleft()
            first_ns = max(self.now_ns, self.prefill_free_ns) + self._prefill_ns(call)
            self.prefill_free_ns = first_ns
            end_ns = first_ns + call.decode_ns
            self.running.append((end_ns, call.number))
            heapq.heappush(self.events, (first_ns, call.number, "first", call))
            heapq.heappush(self.events, (end_ns, call.number, "end", call))

    def _first(self, call: Call) -> None:
        call.ttft_ns = self.now_ns - call.at_ns
        self.served.append(call)
        assert call.load is not None
        self.waits.observe(
            Sample(
                load=call.load,
                kind="",
                worker="w",
                at_ns=self.now_ns,
                ttft_ns=call.ttft_ns,
                prefill_ns=self._prefill_ns(call),
                predicted_ns=call.predicted_ns,
            )
        )


def poisson_calls(seed: int, *, rate: float, seconds: float, prompt_tokens: int = 500, decode_s: float = 1.0):
    """A trace: Poisson arrivals, prompts of half to one and a half of the mean, exponential answers."""
    random = stream(seed, "timed-route")
    calls: list[Call] = []
    at_s = 0.0
    while True:
        at_s += random.expovariate(rate)
        if at_s > seconds:
            return calls
        calls.append(
            Call(
                number=len(calls),
                at_ns=int(at_s * NS_PER_S),
                prompt_tokens=random.randrange(prompt_tokens // 2, prompt_tokens * 3 // 2),
                decode_ns=int(random.expovariate(1 / decode_s) * NS_PER_S) + NS_PER_MS,
            )
        )
