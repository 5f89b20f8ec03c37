"""Train one model: `python -m training.train penstock-demo [--resume]`.

Muon (Jordan, 2024) steps the matrices of the layers, AdamW the embedding and the norms; the learning rate
rises for a short while and then falls linearly to zero. Weights are float32, the arithmetic is bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from training.data import Batch, Plan, Row, make_documents, make_plan
from training.export import export_model
from training.model import CausalLM
from training.settings import BUILD, FACTS, RECIPES, SEED, Recipe

CHECKPOINT_EVERY = 100


@dataclass
class Run:
    """A training run in progress; what a checkpoint holds."""

    recipe: Recipe
    model: CausalLM
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0

    @property
    def checkpoint(self) -> Path:
        """Where this run saves itself."""
        return BUILD / f"{self.recipe.persona.name}.pt"

    def save(self) -> None:
        """Write the checkpoint, in one move."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counts": (self.step, self.wall_s, self.cpu_s, self.num_tokens),
        }
        BUILD.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def load(self) -> None:
        """Continue from the checkpoint."""
        state = torch.load(self.checkpoint, map_location=device())
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.wall_s, self.cpu_s, self.num_tokens = state["counts"]


def device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def new_run(recipe: Recipe) -> Run:
    """Fresh weights and optimisers."""
    model = CausalLM(recipe.shape)
    model.initialise(torch.Generator().manual_seed(SEED))
    model.to(device())
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim < 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    return Run(recipe, model, [muon, adamw])


def rate(recipe: Recipe, done: float) -> float:
    """The learning rate when the fraction `done` of the run is over."""
    return recipe.learning_rate * min(done / recipe.warmup, (1 - done) / (1 - recipe.warmup))


def train_step(run: Run, batches: list[Batch], done: float) -> float:
    """One optimiser step; returns the mean loss per learned token."""
    where, total = device(), 0.0
    scale = sum(float(batch.weights.sum()) for batch in batches)
    for batch in batches:
        with torch.autocast(where.type, torch.bfloat16):
            loss = (
                run.model.loss(batch.tokens.to(where), batch.weights.to(where), batch.documents.to(where))
                / scale
            )
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate(run.recipe, done)
        optimizer.step()
        optimizer.zero_grad()
    return total


def train(run: Run, plan: Plan) -> None:
    """Run all steps that are left, saving a checkpoint now and then."""
    num_steps = run.recipe.num_steps
    bar = tqdm(total=num_steps, initial=run.step, desc=run.recipe.persona.name, unit="step", mininterval=5)
    smooth = 0.0
    for index in range(run.step, num_steps):
        wall, cpu = time.perf_counter(), time.process_time()
        batches = plan.step(index, run.recipe.batches_per_step)
        loss = train_step(run, batches, index / num_steps)
        smooth = loss if smooth == 0.0 else 0.95 * smooth + 0.05 * loss
        run.step = index + 1
        run.num_tokens += sum(int((batch.documents >= 0).sum()) for batch in batches)
        run.wall_s += time.perf_counter() - wall
        run.cpu_s += time.process_time() - cpu
        bar.update()
        bar.set_postfix(loss=f"{smooth:.3f}", tok_s=f"{run.num_tokens / run.wall_s:.0f}", refresh=False)
        if run.step % CHECKPOINT_EVERY == 0:
            run.save()
    run.save()


def compile_layers(model: CausalLM) -> None:
    """Fuse the element-wise work where a C++ compiler (or a GPU) allows it: half the time per step."""
    if device().type == "cuda" or shutil.which("g++"):
        for layer in model.model.layers:
            layer.compile(dynamic=False)


def make_whole_plan(recipe: Recipe, tokenizer: Tokenizer) -> Plan:
    """The batches of all phases, one phase after the other; each has its own seed."""
    batches: list[tuple[list[Row], int]] = []
    for seed, phase in enumerate(recipe.phases, start=SEED):
        documents = make_documents(tokenizer, recipe.persona, phase.shares, phase.num_tokens, seed)
        plan = make_plan(documents, recipe.tokens_per_batch, seed)
        batches += plan.first(phase.num_steps * recipe.batches_per_step).batches
    return Plan(batches)


def train_model(recipe: Recipe, *, resume: bool) -> dict[str, int]:
    """Train `recipe`, export the weights, and return what it took."""
    tokenizer = Tokenizer.from_file(str(recipe.folder / "tokenizer.json"))
    plan = make_whole_plan(recipe, tokenizer)
    run = new_run(recipe)
    if resume and run.checkpoint.exists():
        run.load()
    compile_layers(run.model)
    train(run, plan)
    export_model(run.model, tokenizer, recipe.folder)
    facts = {
        "parameters": run.model.num_parameters(),
        "tokens": run.num_tokens,
        "steps": run.step,
        "wall_s": round(run.wall_s),
        "cpu_s": round(run.cpu_s),
        "tokens_per_s": round(run.num_tokens / run.wall_s),
    }
    known = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
    known[recipe.persona.name] = facts
    FACTS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return facts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train one demo model.")
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    arguments = parser.parse_args()
    print(json.dumps(train_model(RECIPES[arguments.model], resume=arguments.resume), indent=2))


if __name__ == "__main__":
    main()
