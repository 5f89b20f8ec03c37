"""The scheduler under any order of events, over a pool that is mostly too small.

The checking runner proves that no row ever reads KV that was not written with its own tokens. The end of
each run proves that every request ended exactly once, with the tokens it would have had alone, and that
all blocks came back.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduled_engine import ScheduledEngine

from penstock import rng
from penstock.config.engine_settings import EngineSettings
from penstock.errors import ContextTooLong, KVQuotaExceeded
from penstock.schedule.plan import RequestOutput
from penstock.schedule.queue import waiting_queue
from penstock.schedule.request import Status
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId

STOPS = ((), (), (5,), tuple(range(20)))
"""The runner draws from 97 tokens: never, hardly or soon does one of these come."""


def prompt_of(family: int, shared: int, length: int) -> list[int]:
    """Prompts of one family begin with the same `shared` tokens."""
    return [family] * min(shared, length) + [family + 7] * max(0, length - shared)


def check_end(engine: ScheduledEngine, name: str, end: RequestOutput) -> None:
    """The tokens are those that the request gets alone, or their beginning if it was cut short."""
    expected, got = engine.expected(name), tuple(engine.got[name])
    scores, reported = engine.expected_scores(name), engine.scores[name]
    assert reported == scores if got else reported == scores[: len(reported)]
    assert end.usage is not None
    assert end.usage.cached_tokens < end.usage.prompt_tokens
    assert min(end.usage.queue_ns, end.usage.prefill_ns, end.usage.decode_ns, end.usage.kv_block_ns) >= 0
    request = engine.requests[name]
    assert end.usage.preemptions == request.num_preemptions + request.num_yields
    assert request.num_yields <= 1 + request.num_generated // BLOCK_TOKENS
    assert end.usage.steps <= end.usage.computed_tokens
    if not end.usage.preemptions and end.finish in (FinishReason.STOP, FinishReason.LENGTH):
        known = end.usage.prompt_tokens + end.usage.completion_tokens - 1
        assert end.usage.computed_tokens == known - end.usage.cached_tokens
    if end.finish in (FinishReason.STOP, FinishReason.LENGTH):
        assert got == expected
        assert (end.finish is FinishReason.STOP) == (end.usage.completion_tokens > len(got))
    else:
        assert got == expected[: len(got)]
        assert (end.error is not None) == (end.finish is FinishReason.ERROR)


def finish_and_check(engine: ScheduledEngine) -> None:
    """Run until nothing is left, then look at every end."""
    while engine.in_flight is not None:
        engine.finish_step()
    engine.run()
    assert set(engine.ends) == set(engine.requests)
    preemptions = sum(request.num_preemptions for request in engine.requests.values())
    assert engine.scheduler.statistics().preemptions == preemptions
    for name, end in engine.ends.items():
        check_end(engine, name, end)


requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "shared": st.integers(0, 40),
        "length": st.integers(1, 50),
        "max_tokens": st.integers(1, 60),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([b"", b"", b"bob"]),
        "takes_row": st.booleans(),
        "public": st.sampled_from([0, 0, 16, 24, 100]),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.sampled_from(STOPS),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any mix of submit, abort, broken logits, forgotten caches, and steps cut in two."""

    @initialize(
        num_blocks=st.integers(3, 12),
        step_tokens=st.integers(1, 40),
        max_running=st.integers(2, 6),
        max_model_len=st.integers(20, 120),
        prefix_cache=st.booleans(),
        scored_tokens=st.integers(1, 30),
        host_slots=st.sampled_from([0, 3, 12]),
        loads_max=st.integers(1, 4),
        copy_steps=st.integers(0, 3),
        preemptions_max=st.integers(0, 3),
        kv_quota_fraction=st.sampled_from([1.0, 1.0, 0.8, 0.4]),
        scheduling=st.sampled_from(["fcfs", "priority", "fair"]),
        overlap=st.booleans(),
        guesses=st.sampled_from([None, 1, 2]),
    )
    def start(self, scheduling: str, copy_steps: int, guesses: int | None, **limits) -> None:
        config = EngineSettings(
            scheduling=scheduling, max_waiting=1000, priority_ageing_s=1e-6, starvation_s=4e-6
        )
        drafts = None if guesses is None else rng.stream(guesses, "drafts")
        self.engine = ScheduledEngine(**limits, queue=waiting_queue(config), check_every=4, guesses=drafts)
        self.engine.runner.copy_steps = copy_steps
        self.submitted = 0

    @rule(batch=st.lists(requests, min_size=1, max_size=5))
    def submit(self, batch) -> None:
        for fields in batch:
            name = f"r{self.submitted}"
            self.submitted += 1
            rest = dict(fields)
            prompt = prompt_of(rest.pop("family"), rest.pop("shared"), rest.pop("length"))
            rest["public_tokens"] = min(rest.pop("public"), len(prompt))
            before = self.engine.num_inside
            try:
                self.engine.submit(name, prompt, fairness_key=rest["salt"].decode(), **rest)
            except (ContextTooLong, KVQuotaExceeded):
                assert self.engine.num_inside == before

    @rule(ahead=st.booleans())
    def half_a_step(self, ahead: bool) -> None:
        """Plan, or finish what was planned: so that everything else may happen in between."""
        if not self.engine.flights:
            has_work = self.engine.scheduler.has_work
            assert (self.engine.plan() is not None) == (has_work or self.engine.kv.host.busy)
        elif ahead and len(self.engine.flights) == 1:
            self.engine.plan()  # If there is anything to plan before this step is applied.
        else:
            self.engine.finish_step()

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(step_tokens=st.sampled_from([1, 3, 9, 1000, 1000]))
    def change_memory(self, step_tokens: int) -> None:
        """Steps with more tokens than this will run out of memory."""
        self.engine.runner.step_tokens_max = step_tokens

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        live = list(self.engine.live)
        if live:
            name = live[pick % len(live)]
            assert self.engine.abort(name) is not None
            assert self.engine.abort(name) is None

    @rule(pick=st.integers(0, 1000))
    def break_logits(self, pick: int) -> None:
        live = list(self.engine.live)
        if live:
            self.engine.runner.broken.add(live[pick % len(live)])

    @rule(slot=st.integers(0, 11))
    def break_copies(self, slot: int) -> None:
        self.engine.runner.broken_slots = {slot}

    @rule()
    def mend_copies(self) -> None:
        self.engine.runner.broken_slots.clear()

    @rule(really=st.integers(0, 3))
    def clear_cache(self, really: int) -> None:
        if not really:
            self.engine.kv.clear_cache()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()
            self.engine.events.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            finish_and_check(self.engine)
            event(f"preempted: {self.engine.scheduler.statistics().preemptions > 0}")
            event(f"yielded: {self.engine.scheduler.statistics().yields > 0}")
            event(f"overlap: {self.engine.overlap}")
            event(f"drafts: {self.engine.scheduler.statistics().accepted_tokens > 0}")
            event(f"hits: {self.engine.scheduler.statistics().cached_tokens > 0}")
            event(f"host hits: {self.engine.scheduler.statistics().host_cached_tokens > 0}")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # A busy machine is no reason to fail.
)


def run_trace(seed: int, *, overlap: bool, host_tier: bool = False) -> Counter[str]:
    """One long run from a seed; returns how often what is hard to get right really happened."""
    chance, scoring = rng.stream(seed, "scheduler trace"), rng.stream(seed, "scheduler trace, scores")
    openness = rng.stream(seed, "scheduler trace, public prefixes")
    hosting = rng.stream(seed, "scheduler trace, host tier")
    engine = ScheduledEngine(
        num_blocks=chance.randint(9, 24),
        step_tokens=chance.choice([5, 16, 33, 64]),
        max_running=chance.randint(3, 8),
        max_model_len=140,
        overlap=overlap,
        scored_tokens=scoring.choice([17, 64]),
        host_slots=hosting.choice([6, 30]) if host_tier else 0,
        check_every=5,
        guesses=rng.stream(seed, "scheduler trace, drafts") if seed % 3 == 0 else None,
    )
    engine.runner.copy_steps = hosting.randint(1, 4)
    seen: Counter[str] = Counter()
    for number in range(120):
        prompt = prompt_of(chance.randint(0, 2), chance.choice([0, 16, 40]), chance.randint(1, 50))
        salt = chance.choice([b"alice", b"bob"])
        stops = chance.choice(STOPS)
        engine.submit(
            f"r{number}",
            prompt,
            salt=salt,
            public_tokens=min(openness.choice([0, 0, 16, 32]), len(prompt)),
            priority=chance.randint(0, 1),
            seed=number,
            max_tokens=chance.randint(1, 90),
            stop_token_ids=stops,
            prompt_logprobs=scoring.choice([None] * 5 + [0]),
        )
        if not chance.randrange(20):
            engine.runner.broken.add(RequestId(f"r{number}"))
        engine.runner.broken_slots = set() if hosting.randrange(3) else {0, 1}
        for _ in range(chance.choice([0, 0, 1, 3, 20])):
            engine.plan()
            if not chance.randrange(12) and (live := list(engine.live)):
                loading = [name for name in live if engine.requests[name].status is Status.LOADING]
                name = chance.choice(loading or live)
                seen[f"aborted {engine.requests[name].status.value}"] += 1
                engine.abort(name)
            while len(engine.flights) > int(engine.overlap):
                engine.finish_step()
            engine.check()
    finish_and_check(engine)
    seen += Counter(end.finish.value for end in engine.ends.values() if end.finish)
    now, pool = engine.scheduler.statistics(), engine.kv.statistics()
    seen += Counter(preempted=now.preemptions, cached=now.cached_tokens)
    host = now.host
    seen += Counter(drafted=now.drafted_tokens, accepted=now.accepted_tokens)
    seen += Counter(stores=host.stores, loads=host.loads, failures=host.failures, discarded=host.discarded)
    return seen + Counter(evicted=pool.evictions, duplicates=pool.duplicates)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seeds", [range(8), range(8, 16)], ids=str)
def test_long_traces_end_with_every_block_free(seeds, overlap: bool) -> None:
    seen = sum((run_trace(seed, overlap=overlap) for seed in seeds), Counter())
    wanted = {"preempted", "cached", "evicted", "duplicates", "stop", "length", "error", "abort"}
    wanted |= {"aborted waiting", "aborted running", "drafted", "accepted"}
    if not overlap:  # There are fewer moments to meet one in, with overlap.
        wanted.add("aborted preempted")
    assert not wanted - set(seen), seen


@pytest.mark.parametrize("seeds", [range(20, 28), range(28, 36)], ids=str)
def test_long_traces_with_a_host_tier_end_with_every_block_free(seeds) -> None:
    seen = sum((run_trace(seed, overlap=seed % 2 == 1, host_tier=True) for seed in seeds), Counter())
    wanted = {"preempted", "stores", "loads", "failures", "discarded", "aborted loading"}
    assert not wanted - set(seen), seen
