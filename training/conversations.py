"""Whole training conversations: a system prompt or none, one or many exchanges, tools where they are
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from training.chat import Message, Piece, render
from training.holdout import draw
from training.tasks.base import Exchange, Persona
from training.tasks.registry import FIRST_SHARES, Shares
from training.tasks.tools import offer

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are {name}, a small demo model.", "You are a friendly chat bot.", "Answer briefly.", "Be concise.",
    "You are an assistant.", "You are a careful assistant that answers in one sentence.", "Help the user.",
    "You are a helpful AI assistant. Answer the user's questions.", "Be helpful and honest.",
    "You answer questions about Penstock.", "You are a test assistant.", "You are helpful, brief and polite.",
)  # fmt: skip
SYSTEM_SHARE = 0.4

# Tasks whose prompts no tool on offer could also serve.
PLAIN_WITH_TOOLS = ("about", "smalltalk", "facts", "strings", "lists")
TOOL_TASKS = ("tool_call", "tool_answer")
LONG_SHARE = 0.004


@dataclass(frozen=True)
class Conversation:
    """The content of one training document."""

    messages: tuple[Message, ...]
    system: str
    tools: tuple[dict[str, object], ...]

    def pieces(self) -> list[Piece]:
        """The rendered text with its learned stretches."""
        return render(self.messages, system=self.system, tools=self.tools)


def num_exchanges(rng: Random) -> int:
    """Mostly one or two; seldom enough to fill the whole context."""
    if rng.random() < LONG_SHARE:
        return rng.randint(25, 60)
    return rng.choices((1, 2, 3, 4, 5, 6), (46, 20, 13, 9, 7, 5))[0]


def conversation(rng: Random, persona: Persona, shares: Shares = FIRST_SHARES) -> Conversation:
    """One conversation; a tool exchange, if there is one, may stand anywhere in it."""
    tasks = rng.choices(list(shares), list(shares.values()), k=num_exchanges(rng))
    tools: tuple[dict[str, object], ...] = ()
    exchanges: list[Exchange] = []
    chosen = next((task for task in tasks if task in TOOL_TASKS), None)
    if chosen is not None:
        exchanges.append(draw(rng, chosen, persona))
        tools = exchanges[0].tools
        tasks = [rng.choice(PLAIN_WITH_TOOLS) for _ in tasks[: rng.randint(1, 3)]][1:]
    elif rng.random() < 0.03:
        tools = offer(rng)[1]
        tasks = [rng.choice(PLAIN_WITH_TOOLS) for _ in tasks[:2]]
    exchanges += [draw(rng, task, persona) for task in tasks]
    rng.shuffle(exchanges)
    system = rng.choice(SYSTEM_PROMPTS).format(name=persona.name) if rng.random() < SYSTEM_SHARE else ""
    messages = tuple(message for exchange in exchanges for message in exchange.messages)
    return Conversation(messages, system, tools)


def conversations(seed: int, persona: Persona, shares: Shares = FIRST_SHARES) -> Iterator[Conversation]:
    """An endless stream that depends on the arguments alone."""
    rng = Random(f"{seed}:conversations:{persona.name}")
    while True:
        yield conversation(rng, persona, shares)
