"""A head for a demo model: it is loaded by its directory, changes no answer, and learns."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_driver import Driver
from tokenizers import Tokenizer

from penstock.types import SamplingParams
from training.data import chat_documents, make_plan
from training.head import TOKENS_PER_BATCH, export_head, load_model, new_head, teach, train
from training.settings import MINI
from training.tasks.registry import LATER_SHARES


def test_a_head_that_learned_a_little_guesses_for_its_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = load_model(MINI)
    tokenizer = Tokenizer.from_file(str(MINI.folder / "tokenizer.json"))
    plan = make_plan(
        chat_documents(tokenizer, MINI.persona, LATER_SHARES, 1, seed=5), TOKENS_PER_BATCH // 4, seed=5
    )
    head = new_head(model)
    batch = plan.step(10, 1)[0]
    before = teach(head, model, batch, None)
    train(head, model, plan.first(10))
    after = teach(head, model, batch, None)
    assert float(after.loss.detach()) < float(before.loss.detach())
    assert after.agreement > max(before.agreement, 0.15)
    export_head(head, model, tmp_path)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n").ids
        for asked in ("What is Penstock?", "Count from 1 to 20", "Tell me a story")
    ]
    how = [SamplingParams(temperature=0.0, max_tokens=32)] * 3
    config: dict[str, object] = {"kernels": "auto", "dtype": "bfloat16", "threads": 1}
    driver = Driver(MINI.folder, speculation=str(tmp_path), draft_worth=0.0, **config)
    assert driver.ask(prompts, how) == Driver(MINI.folder, **config).ask(prompts, how)
    assert driver.core.stats().accepted_tokens > 0
