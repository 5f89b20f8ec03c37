"""The promise: a request's tokens and log-probabilities do not depend on anything but itself, to the last
bit.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
from engine_driver import Answer, Driver
from knowing_proposer import KnowingProposer
from msgspec import structs
from tiny_models import VOCAB_SIZE

from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.native.library import Type
from penstock.rng import stream
from penstock.types import FinishReason, SamplingParams

LENGTHS = (1, 9, 16, 33, 127, 130, 257)
MAX_TOKENS = 12
CHUNKS = (1, 7, 48)


def prompts() -> list[list[int]]:
    random = stream(5, "prompts")
    shared = [random.randrange(VOCAB_SIZE) for _ in range(100)]
    return [
        # Some share a prefix, so that they meet in the cache.
        (shared * (index % 2) + [random.randrange(VOCAB_SIZE) for _ in range(length)])[:length]
        for index, length in enumerate(LENGTHS)
    ]


def sampling() -> list[SamplingParams]:
    """Greedy, every filter and every change to the logits, in turn."""
    kinds = (
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=0.8, seed=11, logprobs=0, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=1.3, seed=12, top_k=20, top_p=0.9, logprobs=2, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=1.0, seed=13, min_p=0.05, logprobs=1, max_tokens=MAX_TOKENS),
        SamplingParams(
            temperature=0.0, repetition_penalty=1.7, logprobs=2, prompt_logprobs=2, max_tokens=MAX_TOKENS
        ),
        SamplingParams(
            temperature=0.9, seed=14, top_p=0.95, presence_penalty=0.5, frequency_penalty=1.3,
            repetition_penalty=1.2, logit_bias=((3, 2.5), (5, -100.0), (9, 4.0)),
            stop_token_ids=tuple(range(20, 60)), min_tokens=MAX_TOKENS, logprobs=1, max_tokens=MAX_TOKENS,
        ),
    )  # fmt: skip
    return [kinds[index % len(kinds)] for index in range(len(LENGTHS))]


def one_by_one(driver: Driver, first: int = len(LENGTHS)) -> list[Answer]:
    asked = list(zip(prompts(), sampling(), strict=True))[:first]
    return [driver.ask([prompt], [params])[0] for prompt, params in asked]


def check_same(answers: list[Answer], expected: list[Answer]) -> None:
    for length, answer, other in zip(LENGTHS[: len(answers)], answers, expected[: len(answers)], strict=True):
        assert len(other.token_ids) == MAX_TOKENS
        assert answer.token_ids == other.token_ids, f"prompt of {length} tokens"
        assert answer.logprobs == other.logprobs, f"prompt of {length} tokens"
        assert answer.prompt_logprobs == other.prompt_logprobs, f"prompt of {length} tokens"
        assert len(answer.prompt_logprobs) in (0, length - 1)


@dataclass
class Case:
    path: Path
    settings: dict[str, object]
    expected: list[Answer]
    """Every request's answer when it has the engine to itself."""

    @cached_property
    def roomy(self) -> tuple[list[Answer], int]:
        """Answers to `crowd` of an engine that has room for all, and how many bytes a block of its KV cache
        has.
        """
        driver = self.driver(prefix_cache=False)
        return driver.ask(*crowd()), 8 * 1024 * 1024 // driver.runner.info.num_blocks

    def driver(self, **config: object) -> Driver:
        return Driver(self.path, **self.settings, **config)


CASES = (
    "qwen3-float32-torch",
    "qwen3-bfloat16-torch",
    "llama-bfloat16-torch",
    "mistral-float32-torch",
    "gemma2-float32-torch",
    "gemma2-bfloat16-torch",
    "gemma3-float32-torch",
    "mixtral-float32-torch",
    "mixtral-bfloat16-torch",
    "mistral-bfloat16-torch",
    "qwen3-float32-native",
    "qwen3-bfloat16-native",
    "mistral-bfloat16-native",
    "gemma2-float32-native",
    "gemma3-bfloat16-native",
    "mixtral-bfloat16-native",
    "qwen3-bfloat16-native-int8",
    "qwen3-bfloat16-native-int4",
)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    family, dtype, kernels, *quantization = request.param.split("-")
    if kernels == "native":
        try:
            native = NativeLibrary()
        except KernelsUnavailable as why:
            pytest.skip(str(why))
        if quantization == ["int8"] and not native.supports(Type.I8):
            pytest.skip(f"{native.isa} has no int8 dot products")
    path = request.getfixturevalue(family)
    settings: dict[str, object] = {
        "dtype": dtype,
        "kernels": kernels,
        "quantization": (*quantization, "none")[0],
    }
    return Case(path, settings, one_by_one(Driver(path, **settings, prefix_cache=False)))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_change_nothing(case: Case, chunk: int) -> None:
    driver = case.driver(prefix_cache=False, step_tokens=chunk)
    # Token by token only those up to 127, whose answers go over the borders of blocks and of the first tile.
    check_same(one_by_one(driver, 5 if chunk == 1 else len(LENGTHS)), case.expected)


@pytest.mark.parametrize("chunk", [16, 512])
def test_the_batch_changes_nothing(case: Case, chunk: int) -> None:
    driver = case.driver(prefix_cache=False, step_tokens=chunk)
    check_same(driver.ask(prompts(), sampling()), case.expected)


@pytest.mark.parametrize("target_ms", [0.0, 1e-6])
def test_the_latency_target_changes_nothing(case: Case, target_ms: float) -> None:
    """Chunks by the measured time of steps, or the least that the config allows: whoever computes does not
    care.
    """
    driver = case.driver(prefix_cache=False, itl_target_ms=target_ms, prefill_tokens_min=5)
    check_same(driver.ask(prompts(), sampling()), case.expected)


def test_the_prefix_cache_changes_nothing(case: Case) -> None:
    driver = case.driver()
    check_same(one_by_one(driver), case.expected)
    warm = driver.ask(prompts(), sampling())
    assert sum(answer.cached_tokens for answer in warm) > 300
    check_same(warm, case.expected)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_resuming_on_another_worker_changes_nothing(case: Case, prefix_cache: bool) -> None:
    """A stream that was cut after any number of tokens goes on as if nothing had happened, wherever it
    stood.
    """
    driver = case.driver(prefix_cache=prefix_cache)
    for cut in (1, 5, MAX_TOKENS - 1):
        so_far = [other.token_ids[: cut + index % 2] for index, other in enumerate(case.expected)]
        so_far = [tokens[: MAX_TOKENS - 1] for tokens in so_far]
        answers = driver.ask(prompts(), sampling(), so_far)
        for prompt, tokens, answer, other in zip(prompts(), so_far, answers, case.expected, strict=True):
            assert answer.token_ids == other.token_ids[len(tokens) :]
            assert answer.logprobs == other.logprobs[len(tokens) :]
            assert answer.prompt_logprobs == [], "they were told before the first token was"
            assert answer.finish == other.finish
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.usage.completion_tokens == MAX_TOKENS
            assert answer.usage.cached_tokens <= len(prompt)


def until_stored(driver: Driver, count: int) -> None:
    """Step an engine without requests until `count` blocks are in host memory."""
    while driver.core.stats().host_stores < count:
        driver.core.step()


def test_reloading_from_host_memory_changes_nothing(case: Case) -> None:
    """Every prompt but the first is computed, forgotten by the device, and brought back."""
    driver = case.driver(host_kv_idle_s=0.0, host_kv_memory_bytes=8 * 1024 * 1024)
    check_same(one_by_one(driver), case.expected)
    until_stored(driver, driver.core.stats().blocks_cached)
    pool = driver.core.kv.pool
    pool.free(pool.allocate(pool.num_available) or ())
    assert driver.core.stats().blocks_cached == 0
    again = driver.ask(prompts(), sampling())
    assert driver.core.stats().host_loads > 20
    assert sum(answer.cached_tokens for answer in again) > 300
    check_same(again, case.expected)


def crowd() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests that need 5 blocks each in the end."""
    random = stream(6, "preempted")
    asked = [[random.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(6)]
    params = [
        SamplingParams(
            temperature=0.5 * (i % 2), seed=i, logprobs=2, max_tokens=40,
            frequency_penalty=0.9 * (i // 2 == 1), repetition_penalty=1.5 if i // 2 == 2 else 1.0,
            prompt_logprobs=1 if i > 2 else None,
        )
        for i in range(6)
    ]  # fmt: skip
    return asked, params


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_preemption_changes_nothing(case: Case, overlap: str) -> None:
    expected, block_bytes = case.roomy
    # There are enough blocks for all to start, and not for all to finish.
    tight = case.driver(kv_memory_bytes=14 * block_bytes, overlap=overlap)
    # Copies run beside the steps: whether one is over when its block is taken is a matter of time.
    for _ in range(20):
        answers = tight.ask(*crowd())
        if tight.core.stats().host_loads:
            break
    assert tight.core.stats().preemptions > 0
    assert tight.core.stats().host_loads > 0, "what was preempted came back from host memory"
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]
    assert [answer.prompt_logprobs for answer in answers] == [answer.prompt_logprobs for answer in expected]
    assert [len(answer.prompt_logprobs) for answer in answers] == [0, 0, 0, 29, 29, 29]


@pytest.mark.parametrize("chunk", [16, 512])
def test_overlap_changes_nothing(case: Case, chunk: int) -> None:
    """Every step is planned before the tokens of the one before are known, with the prefix cache cold and
    warm.
    """
    driver = case.driver(overlap="on", step_tokens=chunk)
    for _ in range(2):
        check_same(driver.ask(prompts(), sampling()), case.expected)


def reported(answers: list[Answer]) -> list[Answer]:
    """What is the same whatever was cached when a request started."""
    return [replace(answer, cached_tokens=0) for answer in answers]


def test_speculation_changes_nothing(case: Case) -> None:
    """Drafts that are often right and sometimes wrong, alone and in a batch, with the prefix cache cold and
    warm; then with overlap and too few blocks.
    """
    (asked, params), (expected, block_bytes) = crowd(), case.roomy
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(asked, expected, strict=True)]

    def driver(**config: object) -> Driver:
        made = case.driver(speculation="ngram", draft_worth=0.0, **config)
        made.runner.proposer = KnowingProposer(texts)
        return made

    roomy = driver()
    alone = [roomy.ask([prompt], [each])[0] for prompt, each in zip(asked, params, strict=True)]
    assert reported(alone) == expected
    assert roomy.core.stats().step < 0.7 * 40 * len(asked)
    assert reported(roomy.ask(asked, params)) == expected
    stats = roomy.core.stats()
    assert 40 < stats.accepted_tokens < stats.drafted_tokens
    tight = driver(overlap="on", kv_memory_bytes=14 * block_bytes)
    assert reported(tight.ask(asked, params)) == expected
    assert tight.core.stats().preemptions > 0


def test_overlap_and_stop_tokens_change_nothing(case: Case) -> None:
    """The token behind a stop is computed and dropped."""
    how = [
        structs.replace(params, stop_token_ids=(other.token_ids[5 + index % 4],), min_tokens=3)
        for index, (params, other) in enumerate(zip(sampling(), case.expected, strict=True))
    ]
    expected = case.driver(overlap="off", prefix_cache=False).ask(prompts(), how)
    assert sum(answer.finish is FinishReason.STOP for answer in expected) > 3
    answers = case.driver(overlap="on").ask(prompts(), how)
    # What is in the cache when a request starts depends on when it starts; its answer does not.
    assert [replace(answer, cached_tokens=0) for answer in answers] == expected
