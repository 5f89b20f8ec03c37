"""Heads that guess from the target's states: the states are the model's, and guesses change no answer."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from eagle_head import EPS, HEAD_DIM, HEADS, KV_HEADS, ROPE_BASE, EagleHead, Layer
from engine_driver import Driver
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.arrays import Int32Array, Int64Array
from penstock.engine.draft_head import DraftHead
from penstock.engine.inputs import RowTables
from penstock.engine.runner import Runner, plan_model
from penstock.engine.speculation import ReadsStates
from penstock.errors import CheckpointError
from penstock.schedule.plan import Drafting, StepPlan, StepResult
from penstock.types import SamplingParams

PROMPTS = [[5, 9, 14, 30 + i] * (4 + i) for i in range(4)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=24)] * 4
DRAWN = [
    SamplingParams(temperature=0.7, seed=1, max_tokens=24),
    SamplingParams(temperature=1.1, seed=2, top_p=0.9, max_tokens=24),
    SamplingParams(temperature=0.5, seed=3, repetition_penalty=1.1, logprobs=2, max_tokens=24),
    SamplingParams(temperature=0.9, seed=4, top_k=5, max_tokens=24),
]


class Listener:
    """Keeps what it reads, and guesses nothing."""

    def __init__(self, step_tokens: int, hidden: int) -> None:
        self.states = torch.zeros(step_tokens, hidden)
        self.received: dict[int, dict[int, Tensor]] = {}

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        pass

    def spent(self) -> None:
        pass

    def idle(self) -> bool:
        return False

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        return np.zeros(len(rows), np.int64)

    def read(self, rows: Int64Array, firsts: Int32Array, counts: Int32Array, tables: RowTables) -> None:
        at = 0
        for row, first, count in zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            for i in range(count):
                self.received.setdefault(row, {})[first + i] = self.states[at + i].clone()
            at += count


def states_of(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """transformers' own, after the last norm: `[num_tokens, hidden]`."""
    with torch.no_grad():
        return model.base_model(torch.tensor([tokens])).last_hidden_state[0]


@pytest.fixture(scope="module")
def target(qwen3: Path) -> PreTrainedModel:
    return cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(qwen3).eval())


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_states_are_what_the_output_head_reads(qwen3: Path, target: PreTrainedModel, kernels: str) -> None:
    """Of every token but the last of an answer, prompts in chunks and rows side by side."""
    driver = Driver(qwen3, kernels=kernels, step_tokens=16, prefix_cache=False)
    listener = Listener(16, target.config.hidden_size)
    driver.runner.proposer = listener
    answers = driver.ask(PROMPTS, GREEDY)
    assert sorted(listener.received) == [0, 1, 2, 3]
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    expected = {len(text): states_of(target, text) for text in texts}
    for received in listener.received.values():
        assert sorted(received) == list(range(len(received)))
        states = torch.stack([received[place] for place in sorted(received)])
        torch.testing.assert_close(states, expected[len(received) + 1][:-1], rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def checkpoint(qwen3: Path, target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was taught what the target says to some prompts, in the layout of published ones."""
    answers = Driver(qwen3).ask(PROMPTS, GREEDY)
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    states = [states_of(target, text) for text in texts]
    table = target.get_input_embeddings().weight.detach()
    out = target.get_output_embeddings().weight.detach()
    torch.manual_seed(3)
    layer = Layer(table.shape[1], 96)
    learn = torch.optim.Adam(layer.parameters(), lr=5e-3)
    for _ in range(60):
        learn.zero_grad()
        for text, known in zip(texts, states, strict=True):
            after = layer(known[:-2], table[torch.tensor(text[1:-1])])
            loss = torch.nn.functional.cross_entropy(after @ out.T, torch.tensor(text[2:]))
            (loss + torch.nn.functional.smooth_l1_loss(after, known[1:-1])).backward()
        learn.step()
    place = tmp_path_factory.mktemp("eagle")
    named = {name: each.detach().contiguous() for name, each in layer.state_dict().items()}
    return written(place, {**named, "embed_tokens.weight": table.clone()})


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 211,
    "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "rope_theta": ROPE_BASE, "rms_norm_eps": EPS, "hidden_act": "silu",
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def written(place: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """A head's directory, as published ones are."""
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(CONFIG | config))
    return place


def guessing(qwen3: Path, head: Path, **config: object) -> Driver:
    return Driver(qwen3, speculation=str(head), draft_worth=0.0, **config)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_trained_head_changes_no_answer_and_is_often_right(
    qwen3: Path, checkpoint: Path, kernels: str
) -> None:
    """To the bit, log-probabilities included: greedy, and drawn with seeds and filters."""
    plain = Driver(qwen3, kernels=kernels, prefix_cache=False)
    driver = guessing(qwen3, checkpoint, kernels=kernels, prefix_cache=False)
    assert isinstance(driver.runner.proposer, DraftHead)
    assert isinstance(driver.runner.proposer, ReadsStates)
    assert driver.ask(PROMPTS, GREEDY) == plain.ask(PROMPTS, GREEDY)
    accepted = driver.core.stats().accepted_tokens
    assert accepted > 4 * 24 / 3, "a third of what is said, where chance gives one in a hundred"
    assert driver.ask(PROMPTS, DRAWN) == plain.ask(PROMPTS, DRAWN)
    assert driver.core.stats().accepted_tokens > accepted


class Beside:
    """A head of ours, and one that computes every pair again for each guess: they guess alike."""

    def __init__(self, ours: DraftHead, other: EagleHead) -> None:
        self._ours, self._other, self.states, self.num_guesses = ours, other, ours.states, 0

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        self._ours.begin(plan, fresh_blocks)
        self._other.begin(plan, fresh_blocks)

    def spent(self) -> Drafting | None:
        return self._ours.spent()

    def idle(self) -> bool:
        return self._ours.idle()

    def read(self, rows: Int64Array, firsts: Int32Array, counts: Int32Array, tables: RowTables) -> None:
        self._ours.read(rows, firsts, counts, tables)
        self._other.states = self.states
        self._other.read(rows, firsts, counts, tables)

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        expected = self._other.propose(rows, known, limit, tables)
        places = list(zip(rows.tolist(), known.tolist(), expected.tolist(), strict=True))
        guesses = [tables.token_ids[row, first : first + count].tolist() for row, first, count in places]
        found = self._ours.propose(rows, known, limit, tables)
        assert found.tolist() == expected.tolist()
        for (row, first, count), wanted in zip(places, guesses, strict=True):
            assert tables.token_ids[row, first : first + count].tolist() == wanted
            self.num_guesses += count
        return found


@pytest.mark.parametrize(("kernels", "step_tokens"), [("native", 16), ("native", 512), ("torch", 16)])
def test_guesses_are_those_of_a_head_without_a_cache(
    qwen3: Path, target: PreTrainedModel, checkpoint: Path, kernels: str, step_tokens: int
) -> None:
    """Whatever was held, stored or overwritten before: prompts longer than what is held, in chunks, and
    answers in which guesses were wrong."""
    prompts = [[(7 * i + 3 * j) % 200 for j in range(20 + 23 * i)] for i in range(4)]
    how = [SamplingParams(temperature=0.0, max_tokens=40)] * 4
    plain = Driver(qwen3, kernels=kernels, prefix_cache=False, step_tokens=step_tokens)
    driver = guessing(qwen3, checkpoint, kernels=kernels, prefix_cache=False, step_tokens=step_tokens)
    ours = driver.runner.proposer
    assert isinstance(ours, DraftHead)
    weights = (
        each.weight.detach() for each in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    other = EagleHead(checkpoint, *weights, step_tokens=step_tokens, dtype=torch.float32)
    driver.runner.proposer = beside = Beside(ours, other)
    assert driver.ask(prompts, how) == plain.ask(prompts, how)
    stats = driver.core.stats()
    assert beside.num_guesses > 100
    assert stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_rows_that_lose_their_blocks_and_prefixes_out_of_the_cache(
    qwen3: Path, checkpoint: Path, kernels: str
) -> None:
    plain, block_bytes = Driver(qwen3, kernels=kernels), 2 * 16 * 2 * 16 * (3 + 1) * 4
    tight = {"overlap": "on", "kv_memory_bytes": 14 * block_bytes, "host_kv_memory_bytes": 1 << 20}
    driver = guessing(qwen3, checkpoint, kernels=kernels, **tight)
    assert driver.runner.info.num_blocks == 14
    prompts = [[5, 9, 14, 30] * 10 + [60 + i] * (1 + 5 * i) for i in range(4)]
    how = [SamplingParams(temperature=0.0, max_tokens=40)] * 2 + [
        SamplingParams(temperature=0.9, seed=i, max_tokens=40, logprobs=1) for i in range(2)
    ]
    expected = [(each.token_ids, each.logprobs) for each in plain.ask(prompts, how)]
    for _ in range(2):
        found = driver.ask(prompts, how)
        assert [(each.token_ids, each.logprobs) for each in found] == expected
    stats = driver.core.stats()
    assert stats.preemptions > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_steps_without_states_cost_a_head_nothing_and_no_answer_is_another(
    qwen3: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then some steps leave none, beneath a policy that always wants drafts: guesses with holes
    before them, and none where the last state is missing.
    """
    plain, reads, reported = Driver(qwen3, kernels="native"), list[bool](), list[bool]()
    run, read = Runner.run, DraftHead.read

    def running(self: Runner, plan: StepPlan) -> StepResult:
        reads.append(len(reads) // 5 % 2 == 0)
        return run(self, replace(plan, reads_states=reads[-1]))

    def reading(
        self: DraftHead, rows: Int64Array, firsts: Int32Array, counts: Int32Array, tables: RowTables
    ) -> None:
        reported.append(True)
        read(self, rows, firsts, counts, tables)

    monkeypatch.setattr(Runner, "run", running)
    monkeypatch.setattr(DraftHead, "read", reading)
    driver = guessing(qwen3, checkpoint, kernels="native")
    how = [replace(each, max_tokens=60) for each in (*GREEDY[:2], *DRAWN[2:])]
    for _ in range(2):
        assert driver.ask(PROMPTS, how) == plain.ask(PROMPTS, how)
    assert len(reported) == sum(reads) < len(reads)
    assert driver.core.stats().accepted_tokens > 0


def test_where_no_draft_pays_no_state_is_read(
    qwen3: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reads = Runner.run, list[bool]()

    def running(self: Runner, plan: StepPlan) -> StepResult:
        reads.append(plan.reads_states)
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", running)
    driver = Driver(qwen3, kernels="native", speculation=str(checkpoint), draft_worth=1e9)
    how = [replace(each, max_tokens=60) for each in GREEDY]
    driver.ask(PROMPTS, how)
    assert reads[0]
    assert not reads[-1]
    del reads[:]
    driver.ask(PROMPTS, how)
    assert not any(reads[20:]), "a law of few steps may let the prompts' be read"


def test_a_head_without_a_table_looks_up_the_targets(qwen3: Path, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["embed_tokens.weight"]
    bare = written(tmp_path, tensors)
    drafted: list[tuple[int, int]] = []
    for head in (checkpoint, bare):
        driver = guessing(qwen3, head)
        driver.ask(PROMPTS, GREEDY)
        stats = driver.core.stats()
        drafted.append((stats.drafted_tokens, stats.accepted_tokens))
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_random_heads_of_other_layers(qwen3: Path, family: str, tmp_path: Path) -> None:
    """With biases, and with norms of query and key heads; and a bias where state and embedding are joined."""
    one = tiny_model(family, num_hidden_layers=1)
    named = {name.removeprefix("model."): each.contiguous() for name, each in one.state_dict().items()}
    for name in ("layers.0.input_layernorm.weight", "norm.weight"):
        del named[name]
    hidden = one.config.hidden_size
    named |= {"fc.weight": torch.randn(hidden, 2 * hidden) * 0.1, "fc.bias": torch.randn(hidden)}
    head = written(tmp_path, named)
    one.config.architectures = [type(one).__name__]
    one.config.save_pretrained(head)
    for kernels in ("native", "torch"):
        driver = guessing(qwen3, head, kernels=kernels)
        assert driver.ask(PROMPTS, DRAWN) == Driver(qwen3, kernels=kernels).ask(PROMPTS, DRAWN)
        assert driver.core.stats().drafted_tokens > 0


def test_the_head_is_in_the_memory_plan(qwen3: Path, checkpoint: Path) -> None:
    given: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 1 << 20, "host_kv_memory_bytes": 0}
    alone, both = (
        plan_model(qwen3, EngineSettings(speculation=how, **given), SystemClock())
        for how in ("off", str(checkpoint))
    )
    assert alone is not None
    assert both is not None
    head = sum(each.nbytes for each in load_file(checkpoint / "model.safetensors").values())
    assert both.weight_bytes > alone.weight_bytes + head
    assert abs(both.num_blocks - alone.num_blocks * 3 / 4) < 1
    assert (1 << 20) * 0.9 < both.kv_bytes <= 1 << 20


def _other_names(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")


def _missing(tensors: dict[str, Tensor]) -> None:
    del tensors["layers.0.self_attn.k_proj.weight"]


def _second_layer(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"].clone()


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :48].clone()


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (_other_names, {}, r"model.safetensors: tensor midlayer.* is of a head of EAGLE-3"),
        (
            _missing,
            {},
            r"tensor layers.0.self_attn.k_proj.weight is missing; expected one of shape \[32, 48\]",
        ),
        (_second_layer, {}, r"tensor layers.1.mlp.up_proj.weight is not part of"),
        (_narrow, {}, r"tensor fc.weight has shape \[48, 48\], the config calls for \[48, 96\]"),
        (None, {"num_hidden_layers": 2}, r"config.json: num_hidden_layers is 2, but a head .* has 1"),
        (None, {"hidden_size": 64}, r"config.json: hidden_size is 64, but a head .* has 48"),
        (None, {"vocab_size": 300}, r"config.json: vocab_size is 300, but a head .* has 211"),
    ],
)
def test_heads_that_are_refused(
    qwen3: Path,
    checkpoint: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None] | None,
    config: dict[str, object],
    words: str,
) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    if change is not None:
        change(tensors)
    head = written(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=words):
        plan_model(qwen3, EngineSettings(speculation=str(head)), SystemClock())


def test_a_head_that_is_a_pickle_is_named_for_what_it_is(
    qwen3: Path, checkpoint: Path, tmp_path: Path
) -> None:
    head = written(tmp_path, load_file(checkpoint / "model.safetensors"))
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        plan_model(qwen3, EngineSettings(speculation=str(head)), SystemClock())
