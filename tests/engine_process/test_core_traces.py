"""Long seeded traces of everything that gateways may do to one engine, in any order.

Whatever the order: every request ends exactly once and only its owner hears of it, its tokens are those that
it gets alone, every block is free at the end, an index kept from the KV events is what the pool knows, and no
tenant's blocks are ever another's. A failing seed is in the test's name.
"""

from array import array
from collections import Counter, defaultdict
from random import Random
from typing import Literal

import pytest
from checking_runner import CheckingRunner, expected_tokens
from event_index import EventIndex

from penstock import rng
from penstock.clock import ManualClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, Outputs, build_core
from penstock.kv.hashing import PUBLIC
from penstock.protocol.worker import ModelInfo, RequestFinished, Submit
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId, SamplingParams

VOCAB_SIZE = 97
MAX_MODEL_LEN = 150
OWNERS, TENANTS = (1, 2, 3), (b"alice", b"bob", b"")
REFUSED = {"InvalidRequest", "ContextTooLong", "Overloaded", "Draining"}


class Runner(CheckingRunner):
    """The checking runner as the engine's: it says what it has."""

    def __init__(self, *, num_blocks: int, max_running: int) -> None:
        super().__init__(num_blocks=num_blocks, max_running=max_running, vocab_size=VOCAB_SIZE)
        self.info = ModelInfo(
            model="checked",
            architecture="Checked",
            dtype="float32",
            num_parameters=0,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            max_running=max_running,
        )

    def warm_up(self) -> None:
        pass


class Gateways:
    """Three connections that do whatever comes to mind, and keep book of what they hear."""

    def __init__(self, chance: Random, overlap: Literal["on", "off"] = "off") -> None:
        self.chance = chance
        max_running = chance.randint(2, 7)
        self.num_blocks = chance.randint(10, 26)
        self.runner = Runner(num_blocks=self.num_blocks, max_running=max_running)
        config = EngineSettings(
            step_tokens=chance.choice([8, 17, 64]),
            max_running=max_running,
            max_waiting=chance.randint(6, 30),
            overlap=overlap,
        )
        self.core: EngineCore = build_core(self.runner, config, b"k" * 32, ManualClock())
        self.events = EventIndex(self.core.kv)
        self.sent: dict[str, tuple[int, Submit]] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestFinished] = {}
        self.seen: Counter[str] = Counter()

    def submit(self) -> None:
        chance, number = self.chance, len(self.sent)
        family, shared = chance.randint(0, 2), chance.choice([0, 16, 40, 64])
        prompt = [
            *range(family, family + shared),
            *chance.choices(range(VOCAB_SIZE), k=chance.randint(1, 40)),
        ]
        prompt = [token % VOCAB_SIZE for token in prompt]
        salt = chance.choice(TENANTS)
        public_tokens = min(chance.choice([0, 16, 20, 48]), len(prompt))
        if not chance.randrange(15):
            salt, public_tokens, prompt = chance.choice(
                [
                    (PUBLIC, 0, prompt),
                    (salt, len(prompt) + 1, prompt),
                    (salt, -1, prompt),
                    (salt, 0, []),
                    (salt, 0, [*prompt, VOCAB_SIZE]),
                    (salt, 0, prompt * 9 + [1] * MAX_MODEL_LEN),
                ]
            )
        request_id = RequestId(f"r{number}")
        message = Submit(
            request_id=request_id,
            prompt=array("i", prompt).tobytes(),
            sampling=SamplingParams(seed=number % 4, max_tokens=chance.randint(1, 60)),
            cache_salt=salt,
            public_tokens=public_tokens,
            priority=chance.randint(0, 1),
            fairness_key=salt.decode(errors="replace"),
        )
        self.runner.salts[request_id] = salt
        self.runner.public[request_id] = public_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if not chance.randrange(20):
            self.runner.broken.add(request_id)
        owner = chance.choice(OWNERS)
        self.sent[request_id] = owner, message
        self.core.submit(owner, message, 0)

    def abort(self) -> None:
        """Some requests, known or not, of this connection or another; or all of one that was lost."""
        owner = self.chance.choice(OWNERS)
        known = list(self.sent)
        some = self.chance.sample(known, min(len(known), self.chance.randint(1, 4)))
        if not self.chance.randrange(4):
            some = [each for each in known if self.sent[each][0] == owner]
        self.core.abort(owner, (*map(RequestId, some), RequestId("unknown")))

    def step(self) -> None:
        self.hear(self.core.step())
        self.events.check()

    def hear(self, outputs: Outputs) -> None:
        for owner, found in outputs.items():
            for output in found:
                sent_by, _ = self.sent[output.request_id]
                assert owner == sent_by, "somebody else's output"
                assert output.request_id not in self.ends, "heard of after its end"
                self.tokens[output.request_id] += output.token_ids
                if output.finish is not None:
                    self.ends[output.request_id] = output.finish
                    self.seen[output.finish.error_kind or output.finish.reason.value] += 1

    def finish(self) -> None:
        """Let the rest end, and look at every end."""
        for _ in range(20_000):
            if not self.core.has_work:
                break
            self.step()
        assert set(self.ends) == set(self.sent), "every request ends exactly once"
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        self.seen["preempted"] = stats.preemptions
        for name, finish in self.ends.items():
            self.check_end(name, finish)

    def check_end(self, name: str, finish: RequestFinished) -> None:
        _, message = self.sent[name]
        if finish.error_kind in REFUSED:
            assert not self.tokens[name]
            return
        prompt = tuple(array("i", message.prompt))
        expected = expected_tokens(
            prompt,
            message.sampling,
            salt=message.cache_salt,
            num_public=message.public_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            vocab_size=VOCAB_SIZE,
        )[: MAX_MODEL_LEN - len(prompt)]
        got = tuple(self.tokens[name])
        assert got == (expected if finish.reason is FinishReason.LENGTH else expected[: len(got)])
        self.seen["cached"] += finish.usage.cached_tokens


def run_trace(seed: int, overlap: Literal["on", "off"]) -> Counter[str]:
    chance = rng.stream(seed, "engine trace")
    gateways = Gateways(chance, overlap)
    drain_at = chance.choice([None, 60, 90])
    for turn in range(120):
        if turn == drain_at:
            gateways.core.drain()
        for _ in range(chance.choice([0, 1, 1, 2, 5])):
            gateways.submit()
        if not chance.randrange(6):
            gateways.abort()
        for _ in range(chance.choice([0, 1, 3, 12])):
            gateways.step()
        if not chance.randrange(25):
            gateways.core.kv.clear_cache()
    gateways.finish()
    return gateways.seen


@pytest.mark.parametrize("seeds", [range(first, first + 4) for first in (0, 4, 8)], ids=str)
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_any_trace_ends_every_request_once_and_frees_every_block(
    seeds: range, overlap: Literal["on", "off"]
) -> None:
    seen = sum((run_trace(seed, overlap) for seed in seeds), Counter[str]())
    assert not {"length", "abort", "EngineFault", "preempted", "cached", *REFUSED} - set(+seen), seen


def test_equal_traces_of_two_tenants_are_apart_in_cache_and_events() -> None:
    """Paired: the same prompts hit for the tenant who sent them before, and never for the other."""
    hits: dict[bytes, int] = {}
    gateways = Gateways(rng.stream(3, "engine trace, paired"))
    for turn, salt in enumerate((b"alice", b"alice", b"bob", b"bob")):
        name = RequestId(f"p{turn}")
        message = Submit(
            request_id=name,
            prompt=array("i", range(90)).tobytes(),
            sampling=SamplingParams(max_tokens=2),
            cache_salt=salt,
        )
        gateways.runner.salts[name] = salt
        gateways.sent[name] = 1, message
        gateways.core.submit(1, message, 0)
        while gateways.core.has_work:
            gateways.step()
        hits.setdefault(salt, 0)
        assert gateways.ends[name].usage.cached_tokens == (80 if turn % 2 else 0)
    names: dict[bytes, set[bytes]] = defaultdict(set)
    for block_hash, owner in gateways.events.owner_of.items():
        names[owner].add(block_hash)
    assert set(names) == {b"alice", b"bob"}
    assert len(names[b"alice"]) == len(names[b"bob"]) == 5
