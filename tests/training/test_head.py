"""A head for a demo model: it is loaded by its directory, changes no answer, and learns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from tokenizers import Tokenizer

from penstock.types import SamplingParams
from training.data import Plan, chat_documents, pack
from training.head import Run, export_head, load_model, new_head, teach, train
from training.settings import MINI
from training.tasks.registry import LATER_SHARES

LENGTH = 256


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that spin for each other take minutes where others want the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_head_that_learned_a_little_guesses_for_its_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = load_model(MINI)
    tokenizer = Tokenizer.from_file(str(MINI.folder / "tokenizer.json"))
    documents = chat_documents(tokenizer, MINI.persona, LATER_SHARES, 1, seed=5)
    rows = pack([each for each in documents if len(each.tokens) <= LENGTH], LENGTH)
    plan = Plan([(rows[first : first + 4], LENGTH) for first in range(0, 48, 4)])
    head = new_head(model)
    batch = plan.step(11, 1)[0]
    before = teach(head, model, batch, None)
    first, checkpoint = Run.new(head), tmp_path / "run.pt"
    train(first, model, plan.first(6))
    first.save(checkpoint)
    again = Run.new(new_head(model))
    again.load(checkpoint)
    head = again.head
    train(again, model, plan.first(10))
    assert len(again.agreements) == 10, "it continued where the first one ended"
    after = teach(head, model, batch, None)
    assert float(after.loss.detach()) < float(before.loss.detach())
    assert after.agreement > before.agreement + 0.05
    export_head(head, model, tmp_path / "head")
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n").ids
        for asked in ("What is Penstock?", "Count from 1 to 20", "Tell me a story")
    ]
    how = [SamplingParams(temperature=0.0, max_tokens=32)] * 3
    config: dict[str, object] = {"kernels": "auto", "dtype": "bfloat16", "threads": 1}
    driver = Driver(MINI.folder, speculation=str(tmp_path / "head"), draft_worth=0.0, **config)
    assert driver.ask(prompts, how) == Driver(MINI.folder, **config).ask(prompts, how)
    assert driver.core.stats().accepted_tokens > 0
