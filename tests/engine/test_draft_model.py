"""A draft model: it changes no answer, and its KV is right whatever became of the rows and blocks before.

The pair is one function: the larger model has one layer more, which adds nothing. So every guess is right
where the draft's KV is, and one that is not tells of a mistake.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver, tiny_runner
from tiny_models import VOCAB_SIZE, save, tiny_model

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.arrays import Int64Array
from penstock.engine.draft_model import DraftModel
from penstock.engine.inputs import RowTables
from penstock.engine.kv_cache import KVCache
from penstock.engine.runner import plan_model
from penstock.errors import ConfigError
from penstock.schedule.plan import Drafting, StepPlan
from penstock.types import SamplingParams

DEMO, MINI = Path("models/penstock-demo"), Path("models/penstock-demo-mini")
PREFIX = [7, 3, 9, 4] * 9
PROMPTS = [PREFIX + [20 + i] * (1 + 5 * i) for i in range(4)]
HOW = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.9, seed=5, top_k=20, max_tokens=40),
    SamplingParams(temperature=1.2, seed=6, top_p=0.9, max_tokens=40),
    SamplingParams(temperature=0.8, seed=7, min_p=0.05, max_tokens=40, logprobs=1),
]


class Misled:
    """A draft model of whose guesses every so manyth place is changed."""

    def __init__(self, inner: DraftModel, wrong_every: int) -> None:
        self._inner, self._wrong_every = inner, wrong_every
        self.num_misled = 0

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        self._inner.begin(plan, fresh_blocks)

    def spent(self) -> Drafting | None:
        return self._inner.spent()

    def idle(self) -> bool:
        return self._inner.idle()

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        limit = np.where((known // 5) % 3 == 0, 1, limit)
        found = self._inner.propose(rows, known, limit, tables)
        for row, num_known, count in zip(rows.tolist(), known.tolist(), found.tolist(), strict=True):
            for place in range(num_known, num_known + count):
                if place % self._wrong_every == 0:
                    tables.token_ids[row, place] = (tables.token_ids[row, place] + 1) % VOCAB_SIZE
                    self.num_misled += 1
                    break
        return found


def drafting(pair: tuple[Path, Path], **config: object) -> Driver:
    return Driver(pair[0], speculation=str(pair[1]), draft_worth=0.0, **config)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("chunk", [16, 512])
def test_every_guess_is_right_where_the_pair_is_one_function(
    pair: tuple[Path, Path], kernels: str, chunk: int
) -> None:
    """Prompts that share their beginning, longer than what a pass takes; the prefix cache cold and warm."""
    plain = Driver(pair[0], kernels=kernels).ask(PROMPTS, HOW)
    driver = drafting(pair, kernels=kernels, step_tokens=chunk)
    for is_cached in (False, True):
        found = driver.ask(PROMPTS, HOW)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        assert [each.logprobs for each in found] == [each.logprobs for each in plain]
        assert (found[0].cached_tokens > 0) == is_cached
    stats = driver.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 150


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_what_wrong_guesses_left_is_computed_again(pair: tuple[Path, Path], kernels: str) -> None:
    """And what rows left that gave their blocks away, with steps planned ahead."""
    plain, block_bytes = Driver(pair[0], kernels=kernels), 2 * 16 * 2 * 16 * (4 + 3) * 4
    expected = [each.token_ids for each in plain.ask(PROMPTS, HOW)]
    tight = {"overlap": "on", "kv_memory_bytes": 14 * block_bytes, "host_kv_memory_bytes": 1 << 20}
    for config in ({}, tight) if kernels == "native" else (tight,):
        driver = drafting(pair, kernels=kernels, **config)
        inner = driver.runner.proposer
        assert isinstance(inner, DraftModel)
        misled = Misled(inner, 7)
        driver.runner.proposer = misled
        for _ in range(2):
            assert [each.token_ids for each in driver.ask(PROMPTS, HOW)] == expected
        stats = driver.core.stats()
        assert misled.num_misled > 20
        if config:
            assert driver.runner.info.num_blocks == 14
            assert stats.preemptions > 0
        # All but those that were changed, and those behind them.
        assert stats.accepted_tokens > 100


def test_right_guesses_behind_wrong_ones(pair: tuple[Path, Path]) -> None:
    """One guess in each step, every third place changed: what is not changed is right, to the last."""
    driver = drafting(pair, kernels="native")
    inner = driver.runner.proposer
    assert isinstance(inner, DraftModel)
    right: list[bool] = []

    class Single(Misled):
        def propose(
            self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
        ) -> Int64Array:
            found = inner.propose(rows, known, np.minimum(limit, 3), tables)
            for row, num_known in zip(rows.tolist(), known.tolist(), strict=True):
                guess = int(tables.token_ids[row, num_known])
                right.append(guess == expected[row][num_known])
                if num_known % 3 == 0:
                    tables.token_ids[row, num_known] = (guess + 1) % VOCAB_SIZE
            return found

    plain = Driver(pair[0], kernels="native").ask(PROMPTS, HOW)
    expected = [[*prompt, *each.token_ids, -1] for prompt, each in zip(PROMPTS, plain, strict=True)]
    driver.runner.proposer = Single(inner, 3)
    found = driver.ask(PROMPTS, HOW)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert len(right) > 40
    assert all(right)


def test_a_draft_that_is_another_model_changes_no_answer() -> None:
    """The demo models, drawn from with penalties, word lists and a minimum length."""
    prompts = [[50 + i, 60, 70, 80 + i] * 5 for i in range(3)]
    how = [
        SamplingParams(temperature=0.0, max_tokens=48, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=1, max_tokens=48, presence_penalty=0.4, logprobs=2),
        SamplingParams(temperature=0.7, seed=2, max_tokens=48, min_tokens=30, stop_token_ids=(5, 60)),
    ]
    config: dict[str, object] = {"kernels": "auto", "threads": 1}
    plain = Driver(DEMO, **config)
    driver = Driver(DEMO, speculation=str(MINI), draft_worth=0.0, **config)
    assert driver.runner.info.speculation == "penstock-demo-mini"
    assert driver.ask(prompts, how) == plain.ask(prompts, how)
    stats = driver.core.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_idle_time_commits_memory_of_the_drafts_cache_too(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, left, asked = drafting(pair).runner, [True, False, True, False], list[KVCache]()

    def commit_idly(cache: KVCache) -> bool:
        asked.append(cache)
        return left.pop()

    monkeypatch.setattr(KVCache, "commit_idly", commit_idly)
    assert runner.idle()
    assert runner.idle()
    target, draft, *again = asked
    assert draft is not target
    assert again == [target, draft]


def test_the_draft_is_in_the_memory_plan(pair: tuple[Path, Path]) -> None:
    given: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 1 << 20, "host_kv_memory_bytes": 0}
    plans = [
        plan_model(pair[0], EngineSettings(speculation=how, **given), SystemClock())
        for how in ("off", str(pair[1]))
    ]
    alone, both = plans
    assert alone is not None
    assert both is not None
    assert both.weight_bytes > alone.weight_bytes
    assert both.num_blocks == alone.num_blocks * 4 // 7
    assert (1 << 20) * 0.9 < both.kv_bytes <= 1 << 20
    runner = tiny_runner(pair[0], speculation=str(pair[1]), **given)
    assert (runner.info.num_blocks, runner.info.kv_bytes) == (both.num_blocks, both.kv_bytes)
    again = plan_model(
        pair[0], EngineSettings(speculation=str(pair[1]), **{**given, "kv_memory_bytes": both.kv_bytes}),
        SystemClock(),
    )  # fmt: skip
    assert again is not None
    assert again.num_blocks == both.num_blocks, "what sleeps wakes with as many"


def _missing(pair: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    return pair[0], place / "nowhere"


def _larger(pair: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    return pair[1], pair[0]


def _itself(pair: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    return pair[0], pair[0]


def _another_tokenizer(pair: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    return DEMO, pair[1]


def _makes_vectors(pair: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    draft = save(tiny_model("qwen3", num_hidden_layers=1), place / "vectors")
    (draft / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}, '
        '{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    (draft / "1_Pooling").mkdir()
    (draft / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 48, "pooling_mode_mean_tokens": true}'
    )
    return pair[0], draft


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_missing, "neither off nor ngram nor a model"),
        (_larger, "not smaller than the model in"),
        (_itself, "not smaller than the model in"),
        (
            _another_tokenizer,
            "tokenizer.json is not the same tokenizer as models/penstock-demo/tokenizer",
        ),
        (_makes_vectors, "makes vectors of texts"),
    ],
)
def test_models_that_are_no_pair_are_refused_by_name(
    pair: tuple[Path, Path],
    tmp_path: Path,
    make: Callable[[tuple[Path, Path], Path], tuple[Path, Path]],
    words: str,
) -> None:
    target, draft = make(pair, tmp_path)
    with pytest.raises(ConfigError, match=words) as refused:
        plan_model(target, EngineSettings(speculation=str(draft)), SystemClock())
    assert str(refused.value).startswith(f"engine.speculation is {draft}")
