"""Which prompts are kept out of training: a stable hash of the prompt's words decides, for every task alike.

Case, punctuation and spacing do not count, so no cosmetic variant of a held-out prompt is trained on either.
"""

from __future__ import annotations

import hashlib
import re
from random import Random

from training.tasks.base import Exchange, Persona
from training.tasks.registry import TASKS

HELD_OUT_PER_MILLE = 40
SALT = "penstock-demo-1"

# The questions that the documentation and the other tests ask. They are always trained on, never evaluated.
SHOWCASE = (
    "Hello!", "hi", "Hey!", "What is Penstock?", "Who are you?", "What can you do?", "Write a haiku",
    "Say hello in five words", "What is the capital of France?", "What is 12 + 30?", "How are you?",
    "Thanks!", "How do I serve a model?", "Tell me a joke", "Tell me a story", "Count from 1 to 10",
    ("What is 2 + "
    "2?"),
    "What is the weather in Paris?",
)  # fmt: skip


def normal(prompt: str) -> str:
    """The words and numbers of `prompt` in lower case; operators count as words."""
    return " ".join(re.findall(r"\w+|[-+*/=°]", prompt.lower()))


ALWAYS_TRAINED = frozenset(normal(prompt) for prompt in SHOWCASE)


def is_held_out(prompt: str) -> bool:
    """Whether `prompt` belongs to the evaluation and must never be trained on."""
    words = normal(prompt)
    if words in ALWAYS_TRAINED:
        return False
    digest = hashlib.sha256(f"{SALT}:{words}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def draw(rng: Random, task: str, persona: Persona, *, held_out: bool = False) -> Exchange:
    """The next exchange of `task` on the wanted side of the hold-out."""
    generate = TASKS[task]
    while True:
        exchange = generate(rng, persona)
        if is_held_out(exchange.prompt) == held_out:
            return exchange


def held_out_exchanges(task: str, persona: Persona, count: int, *, seed: int) -> list[Exchange]:
    """`count` held-out exchanges with distinct prompts: the evaluation set of one task."""
    rng = Random(f"{seed}:evaluation:{task}")
    found: dict[str, Exchange] = {}
    for _ in range(count * 200):
        exchange = draw(rng, task, persona, held_out=True)
        found.setdefault(normal(exchange.prompt), exchange)
        if len(found) == count:
            break
    return list(found.values())
