"""Everything that defines a training run: the two shapes, the seeds, the token budgets and the rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.model import ModelConfig
from training.tasks.base import Persona
from training.tasks.registry import FIRST_SHARES, LATER_SHARES, Shares

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
BUILD = ROOT / "training" / "build"
SCORES = ROOT / "training" / "scores.json"
FACTS = ROOT / "training" / "facts.json"

SEED = 20
EVALUATION_SEED = 7
VOCAB_SIZE = 4096
CONTEXT = 4096


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one mixture of tasks: `num_steps` steps out of about `num_tokens` tokens
    made.
    """

    shares: Shares
    num_tokens: int
    num_steps: int


@dataclass(frozen=True)
class Recipe:
    """How one model is made."""

    persona: Persona
    shape: ModelConfig
    phases: tuple[Phase, ...]
    learning_rate: float
    tokens_per_batch: int = 4096
    batches_per_step: int = 2
    warmup: float = 0.02
    weight_decay: float = 0.05

    @property
    def num_steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def folder(self) -> Path:
        """Where the finished model lives."""
        return MODELS / self.persona.name


DEMO = Recipe(
    persona=Persona("penstock-demo", "12M"),
    shape=ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1152,
        max_position_embeddings=CONTEXT,
    ),
    phases=(Phase(FIRST_SHARES, 14_000_000, 1000), Phase(LATER_SHARES, 7_000_000, 812)),
    learning_rate=4e-3,
)

MINI = Recipe(
    persona=Persona("penstock-demo-mini", "3M"),
    shape=ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=512,
        max_position_embeddings=CONTEXT,
    ),
    phases=(Phase(FIRST_SHARES, 3_200_000, 700), Phase(LATER_SHARES, 3_200_000, 700)),
    learning_rate=4e-3,
    batches_per_step=1,
)

RECIPES = {recipe.persona.name: recipe for recipe in (DEMO, MINI)}
