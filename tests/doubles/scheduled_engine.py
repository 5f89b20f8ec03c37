"""A scheduler driven over the checking runner, with everything that was ever said about each request."""

from collections import defaultdict, deque
from random import Random

import pytest
from checking_runner import CheckingRunner, expected_scores, expected_tokens
from event_index import EventIndex

from penstock.clock import ManualClock
from penstock.kv.cache.host_tier import HostLimits
from penstock.kv.cache.manager import KVManager
from penstock.kv.hashing import BlockHasher, token_array
from penstock.schedule.batch import BatchLimits, resolve_max_running
from penstock.schedule.plan import RequestOutput, StepPlan
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.queue import FCFSQueue, WaitingQueue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams, TokenLogprob

STEP_NS = 1000
IDLE_NS = 20 * STEP_NS


class ScheduledEngine:
    """Submit, step, abort; outputs are collected in `got` and `ends`, and checked as they come.

    With `overlap` every step is planned, and launched, while the one before is in flight.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        step_tokens: int = 64,
        max_running: int = 8,
        max_model_len: int = 1000,
        prefix_cache: bool = True,
        max_waiting: int = 100,
        scored_tokens: int = 64,
        targets: LatencyTargets | None = None,
        host_slots: int = 0,
        loads_max: int = 4,
        queue: WaitingQueue | None = None,
        preemptions_max: int = 3,
        kv_quota_fraction: float = 1.0,
        overlap: bool = False,
        check_every: int = 0,
        guesses: Random | None = None,
    ) -> None:
        """`guesses`: the runner has drafts, as it says.

        `check_every`: invariants are looked at after every so many changes; 0 is by the pool's size.

        A look walks all blocks, and a broken invariant hardly ever mends itself: long runs and large pools
        look less often.
        """
        hasher = BlockHasher(key=bytes(32), identity="m float32")
        if prefix_cache:
            host = HostLimits(num_slots=host_slots, idle_ns=IDLE_NS, loads_max=loads_max, stores_max=4)
            self.kv = KVManager.with_prefix_cache(num_blocks, hasher, host)
        else:
            self.kv = KVManager.without_prefix_cache(num_blocks)
        self.events = EventIndex(self.kv)
        self.clock = ManualClock(now_ns=7)
        limits = BatchLimits(
            step_tokens,
            resolve_max_running(max_running, step_tokens),
            max_model_len,
            scored_tokens,
            preemptions_max,
            kv_quota_fraction,
        )
        prefill = PrefillBudget(targets or LatencyTargets())
        if queue is None:  # An empty one is false.
            queue = FCFSQueue(max_waiting)
        worth = None if guesses is None else 0.0
        self.scheduler = Scheduler(limits, self.kv, self.clock, queue, prefill, draft_worth=worth)
        self.runner = CheckingRunner(
            num_blocks=num_blocks, max_running=max_running, num_host_slots=host_slots
        )
        self.runner.guesses = guesses
        self.requests: dict[str, Request] = {}
        self.live: dict[str, None] = {}  # Taken and not heard to have ended, oldest submission first.
        self.got: dict[str, list[int]] = defaultdict(list)
        self.scores: dict[str, list[TokenLogprob]] = defaultdict(list)
        self.ends: dict[str, RequestOutput] = {}
        self.plans: list[StepPlan] = []
        self.overlap = overlap
        self.flights: deque[StepPlan] = deque()
        self._check_every, self._num_changes = check_every or max(1, num_blocks // 64), 0

    def submit(
        self,
        name: str,
        prompt,
        *,
        salt: bytes = b"",
        public_tokens: int = 0,
        priority: int = 0,
        fairness_key: str = "",
        takes_row: bool = False,
        **sampling,
    ) -> None:
        """Sampling has 4 tokens at most and no stop token, unless said otherwise."""
        request = Request(
            request_id=RequestId(name),
            tokens=token_array(prompt),
            sampling=SamplingParams(**{"max_tokens": 4, **sampling}),
            salt=salt,
            public_tokens=public_tokens,
            priority=priority,
            fairness_key=fairness_key,
            takes_row=takes_row,
        )
        self.scheduler.submit(request)
        self.requests[name] = request
        self.live[name] = None
        self.runner.salts[request.request_id] = salt
        self.runner.public[request.request_id] = num_public(request)

    def hear(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name not in self.ends, f"{name} is heard of after its end"
        assert (output.finish is None) == (output.usage is None)
        assert not (output.prompt_logprobs and self.got[name]), f"{name}: prompt scored after its first token"
        self.got[name].extend(output.token_ids)
        self.scores[name].extend(output.prompt_logprobs)
        if output.finish is not None:
            self.ends[name] = output
            self.live.pop(name, None)

    @property
    def num_inside(self) -> int:
        """Requests that the scheduler has, by its own count."""
        statistics = self.scheduler.statistics()
        return statistics.running + statistics.waiting

    @property
    def in_flight(self) -> StepPlan | None:
        return self.flights[0] if self.flights else None

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.flights.append(plan)
            self.runner.launch(plan)
            limits = self.scheduler.limits
            assert plan.num_tokens <= limits.step_tokens
            assert plan.work or self.kv.host.busy, "an empty plan has nothing to wait for"
            assert len(plan.work) <= limits.max_running
            assert sum(work.num_tokens for work in plan.work if work.scores) <= limits.scored_tokens
        return plan

    def finish_step(self) -> None:
        plan, result = self.flights.popleft(), self.runner.collect()
        assert plan.step == result.step
        self.clock.advance(STEP_NS)
        for output in self.scheduler.apply(result).outputs:
            self.hear(output)

    def step(self) -> StepPlan | None:
        """Finish a step, the next one being planned or not. None when there is nothing to do."""
        plan = None
        while len(self.flights) < (2 if self.overlap else 1) and (planned := self.plan()) is not None:
            plan = planned
            self.check()
        plan = plan or self.in_flight
        if self.flights:
            self.finish_step()
        self.check()
        return plan

    def check(self) -> None:
        """After a change; see `check_every`."""
        self._num_changes += 1
        if self._num_changes % self._check_every == 0:
            self.scheduler.check_invariants()
            self.events.check()

    def abort(self, name: str) -> RequestOutput | None:
        output = self.scheduler.abort(RequestId(name))
        if output is not None:
            self.hear(output)
        return output

    def step_until_preempted(self, name: str) -> None:
        for _ in range(200):
            if self.requests[name].num_preemptions:
                return
            self.step()
        pytest.fail(f"{name} is never preempted")

    def run(self, steps_max: int = 10_000) -> None:
        for _ in range(steps_max):
            if self.step() is None:
                break
        else:
            pytest.fail(f"not idle after {steps_max} steps")
        self.scheduler.check_invariants()
        self.events.check()
        assert not self.scheduler.has_work
        assert not self.live, "requests whose end was never heard of"
        now = self.kv.statistics()
        assert now.used == now.draining == 0

    def expected_scores(self, name: str) -> list[TokenLogprob]:
        request = self.requests[name]
        if request.sampling.prompt_logprobs is None:
            return []
        return expected_scores(
            tuple(request.tokens[: request.num_prompt]), salt=request.salt, num_public=num_public(request)
        )

    def expected(self, name: str) -> tuple[int, ...]:
        request = self.requests[name]
        prompt = tuple(request.tokens[: request.num_prompt])
        left = self.scheduler.limits.max_model_len - request.num_prompt
        known = {"salt": request.salt, "num_public": num_public(request)}
        return expected_tokens(prompt, request.sampling, **known)[:left]


def num_public(request: Request) -> int:
    """Tokens in the public region: whole blocks only."""
    return request.public_tokens // BLOCK_TOKENS * BLOCK_TOKENS
