"""The shared parts of every task generator: the exchange it makes, and ways to vary how people type.

A generator is `(rng, persona) -> Exchange`: pure, and random only through `rng`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from training.chat import Message


@dataclass(frozen=True)
class Persona:
    """Which model is speaking; only questions about itself depend on it."""

    name: str
    size: str


@dataclass(frozen=True)
class Exchange:
    """A user's question and the model's answer, perhaps with a tool in between.

    The last message is the assistant's answer that the evaluation compares.
    """

    task: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def prompt(self) -> str:
        """The user's text; the hold-out is decided by it."""
        return self.messages[0].content

    @property
    def answer(self) -> str:
        """The expected text of the last assistant turn."""
        return self.messages[-1].content


Generator = Callable[[Random, Persona], Exchange]

OPENERS = (
    "Please tell me: ", "Tell me, ", "Quick question: ", "Hey, ", "Hi, ", "I wonder: ", "Can you tell me, ",
    "Question: ", "Please answer: ", "One more thing: ", "So, ", "OK, ", "Could you help me? ", "Next: ",
)  # fmt: skip
CLOSERS = (" Thanks!", " Please.", " Thank you.", " Please answer briefly.", " I forgot.", " Just curious.")


def ask(task: str, user: str, answer: str) -> Exchange:
    """The commonest exchange: one question, one answer."""
    return Exchange(task, (Message("user", user), Message("assistant", answer)))


def typed(rng: Random, text: str) -> str:
    """`text` as different people would type it: with courtesies, in lower case, without the final mark.

    Only for questions whose words may be written in any case; quoted data must not pass through here.
    """
    if rng.random() < 0.25:
        opener = rng.choice(OPENERS)
        text = opener + (text if opener.endswith((": ", "? ")) else lower_first(text))
    if rng.random() < 0.1:
        text += rng.choice(CLOSERS)
    draw = rng.random()
    if draw < 0.15:
        return text.rstrip("?.!")
    if draw < 0.25:
        return text.lower()
    if draw < 0.35:
        return text.lower().rstrip("?.!")
    return text


def opened(rng: Random, text: str) -> str:
    """`text` with a courtesy around it at times, its own letters untouched."""
    if rng.random() < 0.2:
        text = rng.choice([opener for opener in OPENERS if opener.endswith(": ")]) + text
    if rng.random() < 0.08:
        text += rng.choice(CLOSERS)
    return text


def lower_first(text: str) -> str:
    """`text` with a small first letter, unless its first word is a name such as `Penstock` or `I`."""
    first = text.split(" ", 1)[0].strip(",.?!")
    return text if first in {"I", "I'm", "Penstock"} or first.isupper() else text[:1].lower() + text[1:]


def pick(rng: Random, phrasings: Sequence[str], **values: object) -> str:
    """One phrasing, filled in."""
    return rng.choice(phrasings).format(**values)
