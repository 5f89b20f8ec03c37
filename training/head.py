"""Make a head that guesses for a demo model, in the manner of EAGLE: `python -m training.head penstock-demo`.

The head (Li et al. 2024, arXiv 2401.15077) sees the model's own state of a token and the embedding of the
next one, and says the state that follows. It is taught what the model says to fresh conversations: its
distribution, and the states themselves. The directory that is written is for
`penstock serve penstock-demo --speculation DIRECTORY`. Interrupted work is taken up by `--resume`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from training.data import Batch, Plan, chat_documents, make_plan
from training.export import replace_text
from training.model import (
    MLP,
    Attention,
    CausalLM,
    ModelConfig,
    RMSNorm,
    causal_mask,
    read_config,
    rope_tables,
)
from training.settings import BUILD, RECIPES, SEED, Recipe
from training.tasks.registry import LATER_SHARES

LEARNING_RATE, WARMUP = 2e-3, 0.05
CHECKPOINT_EVERY = 20
STATES_SHARE = 1.0
NOISE = 0.1
"""Uniform, added to the states: behind the first guess the head reads states of its own, which are not
exact."""
TOKENS_PER_BATCH = 2048


class Layer(nn.Module):
    """A decoder layer without its first norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(x, cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """Parameters have the names of published heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])

    def forward(self, states: Tensor, embeddings: Tensor, documents: Tensor) -> Tensor:
        """All `[batch, length, ...]`: the states that follow."""
        x = self.fc(torch.cat([embeddings, states], dim=-1))
        cos, sin = rope_tables(self.config, x.shape[1], x.device)
        return self.layers[0](x, cos.to(x.dtype), sin.to(x.dtype), causal_mask(documents))


@dataclass(frozen=True)
class Taught:
    """How well the head says what the model says, of the tokens of answers."""

    loss: Tensor
    agreement: float
    """The share of places at which both find the same token likeliest."""


def teach(head: Head, model: CausalLM, batch: Batch, noise: torch.Generator | None) -> Taught:
    """Compare the head with the model over one batch."""
    tokens, documents, table = batch.tokens, batch.documents, model.model.embed_tokens.weight
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model.hidden(tokens, documents).float()
    # Pair i is the state of token i and token i + 1; it says the state of token i + 1, and so token i + 2.
    before, after = states[:, :-2], states[:, 1:-1]
    if noise is not None:
        before = before + (torch.rand(before.shape, generator=noise) - 0.5) * 2 * NOISE * before.std()
    chosen = (batch.weights[:, 2:] > 0) & (documents[:, :-2] == documents[:, 2:])
    after = after[chosen]
    with torch.autocast("cpu", torch.bfloat16):
        said = head(before, table[tokens[:, 1:-1]], documents[:, 1:-1])[chosen]
        ours, theirs = F.linear(said, table), F.linear(after, table)
    divergence = F.cross_entropy(ours.float(), theirs.float().softmax(-1))
    loss = divergence + STATES_SHARE * F.smooth_l1_loss(said.float(), after)
    return Taught(loss, float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))


def load_model(recipe: Recipe) -> CausalLM:
    """The finished model, in float32."""
    model = CausalLM(read_config((recipe.folder / "config.json").read_text(encoding="utf-8")))
    weights = load_file(recipe.folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval().requires_grad_(False)


def new_head(model: CausalLM) -> Head:
    """A head with the shape of one of the model's layers, which begins as its last one."""
    head = Head(model.config)
    last = model.model.layers[-1].state_dict()
    head.layers[0].load_state_dict(
        {name: weight.clone() for name, weight in last.items() if not name.startswith("input_layernorm")}
    )
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, model.config.hidden_size :].fill_diagonal_(1.0)
    return head


@dataclass
class Run:
    """The training of a head, and what a checkpoint holds of it."""

    head: Head
    optimizer: torch.optim.Optimizer
    noise: torch.Generator
    agreements: list[float]
    """Of each step that is done."""

    @classmethod
    def new(cls, head: Head) -> Run:
        """Before the first step."""
        optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        return cls(head, optimizer, torch.Generator().manual_seed(SEED), [])

    def save(self, path: Path) -> None:
        """Write the checkpoint, in one move."""
        path.parent.mkdir(parents=True, exist_ok=True)
        states = (self.head.state_dict(), self.optimizer.state_dict(), self.noise.get_state())
        torch.save((*states, self.agreements), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        head, optimizer, noise, self.agreements = torch.load(path, weights_only=True)
        self.head.load_state_dict(head)
        self.optimizer.load_state_dict(optimizer)
        self.noise.set_state(noise)


def train(run: Run, model: CausalLM, plan: Plan, checkpoint: Path | None = None) -> float:
    """One step for each batch that is left; the mean agreement over the last tenth of all."""
    head, optimizer, num_steps = run.head, run.optimizer, len(plan.batches)
    bar = tqdm(
        range(len(run.agreements), num_steps), desc="head", unit="step", mininterval=5,
        initial=len(run.agreements), total=num_steps,
    )  # fmt: skip
    for index in bar:
        done = index / num_steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((done + 1e-3) / WARMUP, (1 - done) / (1 - WARMUP))
        [batch] = plan.step(index, 1)
        taught = teach(head, model, batch, run.noise)
        optimizer.zero_grad()
        taught.loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        run.agreements.append(taught.agreement)
        bar.set_postfix(
            loss=f"{float(taught.loss.detach()):.3f}", agrees=f"{taught.agreement:.3f}", refresh=False
        )
        if checkpoint is not None and len(run.agreements) % CHECKPOINT_EVERY == 0:
            run.save(checkpoint)
    last = run.agreements[-max(1, num_steps // 10) :]
    return sum(last) / len(last)


def export_head(head: Head, model: CausalLM, folder: Path) -> None:
    """Write the head's directory, as published ones are: with a copy of the model's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_hf(eos_token_id=2, pad_token_id=0) | {"num_hidden_layers": 1}
    weights = head.state_dict() | {"embed_tokens.weight": model.model.embed_tokens.weight}
    save_file(
        {name: weight.to(torch.bfloat16).contiguous().clone() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    replace_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def make_head(recipe: Recipe, folder: Path, num_steps: int, *, resume: bool) -> float:
    """Train and write a head for a finished demo model; how often it agrees with that."""
    model, checkpoint = load_model(recipe), folder.with_suffix(".pt")
    tokenizer = Tokenizer.from_file(str(recipe.folder / "tokenizer.json"))
    num_tokens = int(num_steps * TOKENS_PER_BATCH * 1.1) + 64 * TOKENS_PER_BATCH
    documents = chat_documents(tokenizer, recipe.persona, LATER_SHARES, num_tokens, SEED + 100)
    head, plan = new_head(model), make_plan(documents, TOKENS_PER_BATCH, SEED).first(num_steps)
    run = Run.new(head)
    if resume and checkpoint.exists():
        run.load(checkpoint)
    agreement = train(run, model, plan, checkpoint)
    export_head(head, model, folder)
    checkpoint.unlink(missing_ok=True)
    return agreement


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make a head that guesses for a demo model.")
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--folder", type=Path, help="where to write; training/build/MODEL-head if not given")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    arguments = parser.parse_args()
    folder = arguments.folder or BUILD / f"{arguments.model}-head"
    agreement = make_head(RECIPES[arguments.model], folder, arguments.steps, resume=arguments.resume)
    print(json.dumps({"folder": str(folder), "agrees": round(agreement, 3)}))


if __name__ == "__main__":
    main()
