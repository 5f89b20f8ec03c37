"""Heads that guess from the target's states: the states are the model's, and guesses change no answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from eagle_head import EagleHead, Layer
from engine_driver import Driver
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.engine.arrays import Int32Array, Int64Array
from penstock.engine.inputs import RowTables
from penstock.engine.speculation import ReadsStates
from penstock.schedule.plan import StepPlan
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

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        return np.zeros(len(rows), np.int64)

    def read(self, rows: Int64Array, firsts: Int32Array, counts: Int32Array) -> None:
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
    save_file({**named, "embed_tokens.weight": table.clone()}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_trained_head_changes_no_answer_and_is_often_right(
    qwen3: Path, target: PreTrainedModel, checkpoint: Path, kernels: str
) -> None:
    """To the bit, log-probabilities included: greedy, and drawn with seeds and filters."""
    plain = Driver(qwen3, kernels=kernels, prefix_cache=False)
    driver = Driver(qwen3, kernels=kernels, prefix_cache=False, speculation="ngram", draft_worth=0.0)
    head = EagleHead(
        checkpoint,
        target.get_input_embeddings().weight.detach(),
        target.get_output_embeddings().weight.detach(),
        step_tokens=512,
        dtype=torch.float32,
    )
    assert isinstance(head, ReadsStates)
    driver.runner.proposer = head
    assert driver.ask(PROMPTS, GREEDY) == plain.ask(PROMPTS, GREEDY)
    accepted = driver.core.stats().accepted_tokens
    assert accepted > 4 * 24 / 3, "a third of what is said, where chance gives one in a hundred"
    assert driver.ask(PROMPTS, DRAWN) == plain.ask(PROMPTS, DRAWN)
    assert driver.core.stats().accepted_tokens > accepted
