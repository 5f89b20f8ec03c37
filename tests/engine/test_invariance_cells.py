"""More cells of the matrix of `test_invariance.py`, with short requests: caches that lost a part, preemption
without a host tier, both together with small chunks and with overlap; and the families and rotations that are
not there.
"""

from pathlib import Path

import pytest
from engine_driver import Answer, Driver
from gguf_files import convert
from knowing_proposer import KnowingProposer
from lora_checkpoints import write_adapter
from quantized_checkpoints import FORMATS, quantize
from tiny_models import LLAMA3_ROPE, PHI3, VOCAB_SIZE, save, tiny_model

from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.rng import stream
from penstock.types import SamplingParams

MAX_TOKENS = 8
LONG_MAX_TOKENS = 60
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "phi3": ("phi3", PHI3 | {"sliding_window": 21}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    "qwen3_awq": ("qwen3", {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}),
    "llama3rope_gguf": (
        "llama",
        {
            "rope_parameters": LLAMA3_ROPE, "hidden_size": 256, "intermediate_size": 256,
            "num_attention_heads": 4, "head_dim": 64,
        },
    ),
}  # fmt: skip
CASES = (
    "phi3-bfloat16-native",
    "qwen2-float32-torch",
    "qwen3_moe-bfloat16-torch",
    "llama3rope_gguf-bfloat16-native",
    "qwen3-bfloat16-native-int8",
    "qwen3-bfloat16-native-auto-adapters",
    "phi3-float32-torch-int8-adapters",
    "qwen3_awq-bfloat16-native-int8-adapters",
)
"""Model, type, kernels, `engine.kv_dtype`; with adapters the requests have one, another one, and none."""
ADAPTERS = ("one", "two", "")


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share their first 40 tokens, if they are so long, greedy and sampled."""
    random = stream(21, "cells")
    shared = [random.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [
        (shared + [random.randrange(VOCAB_SIZE) for _ in range(length)])[:length] for length in (9, 70, 135)
    ]
    params = [
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=0.9, seed=4, top_p=0.9, logprobs=2, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2, max_tokens=MAX_TOKENS),
    ]
    return prompts, params


def crowd(order: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Three requests of six blocks each in the end; `order` 1 or -1."""
    random = stream(22, "cells, crowd")
    prompts = [[random.randrange(VOCAB_SIZE) for _ in range(30 + i)] for i in range(3)]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, logprobs=1, max_tokens=LONG_MAX_TOKENS)
        for i in range(3)
    ]
    return prompts[::order], params[::order]


class Case:
    """One model on one kind of kernels, with what each request is answered alone."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        kernels: str,
        kv_dtype: str = "auto",
        adapters: dict[str, Path] | None = None,
    ) -> None:
        self.path, self.settings = path, {"dtype": dtype, "kernels": kernels, "kv_dtype": kv_dtype}
        self.adapters = adapters
        driver = self.driver(prefix_cache=False)
        self.block_bytes = 8 * 1024 * 1024 // driver.runner.info.num_blocks
        self.alone = self.one_by_one(driver)
        self.crowd_alone = self.each_alone(driver, *crowd(1))
        if adapters is not None:
            plain = [driver.ask([prompt], [how])[0] for prompt, how in zip(*asked(), strict=True)]
            changed = [was.token_ids != now.token_ids for was, now in zip(plain, self.alone, strict=True)]
            assert changed == [True, True, False]

    def driver(self, **config: object) -> Driver:
        return Driver(self.path, self.adapters, **self.settings, **config)

    def named(self, order: int = 1) -> list[str] | None:
        return None if self.adapters is None else list(ADAPTERS[::order])

    def each_alone(
        self, driver: Driver, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[Answer]:
        names = self.named() or [""] * len(prompts)
        return [
            driver.ask([prompt], [how], adapters=[name])[0]
            for prompt, how, name in zip(prompts, params, names, strict=True)
        ]

    def one_by_one(self, driver: Driver) -> list[Answer]:
        return self.each_alone(driver, *asked())


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, dtype, kernels, *rest = request.param.split("-")
    kv_dtype, has_adapters = rest[0] if rest else "auto", "adapters" in rest
    if kernels == "native":
        try:
            NativeLibrary()
        except KernelsUnavailable as why:
            pytest.skip(str(why))
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    path = save(model, tmp_path_factory.mktemp(name))
    adapters = {
        each: write_adapter(path / each, model, rank=3 + i, seed=i) for i, each in enumerate(ADAPTERS[:2])
    }
    if name.endswith("_gguf"):  # Products of four bits, of bf16, and of both in one layer.
        path = convert(path, path / "model.gguf", recipe="gguf-q4_k_m")
    elif name.endswith("_awq"):
        quantize(path, path / "awq", path / "twin", FORMATS["awq"])
        path = path / "awq"
    return Case(path, dtype, kernels, kv_dtype, adapters if has_adapters else None)


def check_same(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert len(other.token_ids) in (MAX_TOKENS, LONG_MAX_TOKENS)
        assert answer.token_ids == other.token_ids
        assert answer.logprobs == other.logprobs
        assert answer.prompt_logprobs == other.prompt_logprobs


def lose_half(driver: Driver) -> int:
    """Somebody else takes half of the blocks that the prefix cache has, and gives them back.

    Returns how many stay.
    """
    pool = driver.core.kv.pool
    now = pool.statistics()
    assert now.cached > 6
    pool.free(pool.allocate(now.free + now.cached // 2) or ())
    stay = pool.statistics().cached
    assert 0 < stay < now.cached
    return stay


@pytest.mark.parametrize("chunk", [7, 16, 48])
def test_chunks_alone_and_in_the_batch(case: Case, chunk: int) -> None:
    driver = case.driver(prefix_cache=False, step_tokens=chunk)
    check_same(driver.ask(*asked(), adapters=case.named()), case.alone)
    if chunk == 16:
        check_same(case.one_by_one(driver), case.alone)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_prefix_cache_that_lost_half_of_its_blocks(case: Case, overlap: str) -> None:
    driver = case.driver(overlap=overlap)
    check_same(case.one_by_one(driver), case.alone)
    whole = sum(answer.cached_tokens for answer in driver.ask(*asked(), adapters=case.named()))
    lose_half(driver)
    partly = driver.ask(*asked(), adapters=case.named())
    check_same(partly, case.alone)
    assert 0 < sum(answer.cached_tokens for answer in partly) < whole


def test_overlap_while_blocks_come_back_from_host_memory(case: Case) -> None:
    driver = case.driver(overlap="on", host_kv_idle_s=0.0, host_kv_memory_bytes=4 * 1024 * 1024)
    check_same(case.one_by_one(driver), case.alone)
    while driver.core.stats().host_stores < driver.core.stats().blocks_cached:
        driver.core.step()
    pool = driver.core.kv.pool
    pool.free(pool.allocate(pool.num_available) or ())
    check_same(driver.ask(*asked(), adapters=case.named()), case.alone)
    assert driver.core.stats().host_loads > 8


@pytest.mark.parametrize(("overlap", "chunk", "prefix_cache"), [("on", 7, True), ("off", 512, False)])
def test_preemption_without_a_host_tier(case: Case, overlap: str, chunk: int, prefix_cache: bool) -> None:
    """What was preempted is found in what is left of its blocks, or computed again, any number of times."""
    counts: list[set[int]] = [set() for _ in case.crowd_alone]
    for order in (1, -1):  # Whoever came last gives way first: in one of the orders everybody does.
        driver = case.driver(
            kv_memory_bytes=9 * case.block_bytes,
            host_kv_memory_bytes=0,
            overlap=overlap,
            step_tokens=chunk,
            prefix_cache=prefix_cache,
        )
        answers = driver.ask(*crowd(order), adapters=case.named(order))[::order]
        check_same(answers, case.crowd_alone)
        assert driver.core.stats().host_loads == 0
        for seen, answer in zip(counts, answers, strict=True):
            assert answer.usage is not None
            seen.add(answer.usage.preemptions)
    assert all(max(seen) > 0 for seen in counts), (
        f"every request was preempted in one of the orders: {counts}"
    )
    assert set.union(*counts) == {0, 1, 2}, f"never, once, and more often: {counts}"


def reported(answers: list[Answer]) -> list[tuple[list[int], object, object]]:
    return [(answer.token_ids, answer.logprobs, answer.prompt_logprobs) for answer in answers]


def test_drafts_change_nothing(case: Case) -> None:
    """Guesses that are often right and sometimes wrong, of rows with and without adapters, with too few
    blocks; and n-grams of the texts themselves.
    """
    prompts, params = crowd(1)
    answers = zip(prompts, case.crowd_alone, strict=True)
    texts = [[*prompt, *answer.token_ids] for prompt, answer in answers]
    for proposer in (KnowingProposer(texts), None):
        driver = case.driver(
            speculation="ngram", draft_worth=0.0, overlap="on", kv_memory_bytes=14 * case.block_bytes
        )
        if proposer is not None:
            driver.runner.proposer = proposer
        assert reported(driver.ask(prompts, params, adapters=case.named())) == reported(case.crowd_alone)
        stats = driver.core.stats()
        assert proposer is None or 20 < stats.accepted_tokens < stats.drafted_tokens


def test_another_worker_goes_on_where_one_was_lost(case: Case) -> None:
    """What it had said is computed again with the same adapter: tokens and log-probabilities are those of an
    answer that nothing befell.
    """
    prompts, params = crowd(1)
    for said in (1, 17):
        driver = case.driver()
        begun = [answer.token_ids[:said] for answer in case.crowd_alone]
        rest = driver.ask(prompts, params, begun, adapters=case.named())
        for before, now, whole in zip(begun, rest, case.crowd_alone, strict=True):
            assert [*before, *now.token_ids] == whole.token_ids
            assert now.logprobs == whole.logprobs[said:]
