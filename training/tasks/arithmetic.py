"""Sums, differences and small products, in digits and in words."""

from __future__ import annotations

from random import Random

from training.tasks.base import Exchange, Persona, ask, typed
from training.tasks.words import NAMES

OPERATIONS = {
    "+": (
        "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a} + {b} = ?",
        "Calculate {a} + {b}.", "Add {a} and {b}.", "What is the sum of {a} and {b}?", ("How much is {a} + "
        "{b}?"),
        "How much is {a} plus {b}?", "What's {a}+{b}?", "What's {a} + {b}?", "Compute {a} + {b}.",
    ),
    "-": (
        "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", ("{a} - {b} = "
        "?"),
        "Calculate {a} - {b}.", "Subtract {b} from {a}.", "How much is {a} - {b}?", ("How much is {a} minus "
        "{b}?"),
        "What's {a} - {b}?", "Compute {a} - {b}.", "What is the difference between {a} and {b}?",
    ),
    "*": (
        "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", ("What is {a} x "
        "{b}?"),
        "Calculate {a} * {b}.", "Multiply {a} by {b}.", "How much is {a} times {b}?", "What's {a} times {b}?",
        "What is the product of {a} and {b}?", "Compute {a} * {b}.",
    ),
    "/": (
        "What is {a} / {b}?", "What is {a} divided by {b}?", "{a} / {b}", "Divide {a} by {b}.",
        "How much is {a} divided by {b}?", "Calculate {a} / {b}.",
    ),
}  # fmt: skip

STORIES = (
    ("{name} has {a} {thing}s and buys {b} more. How many {thing}s does {name} have now?", "+"),
    ("There are {a} {thing}s in a box and {b} in another. How many {thing}s are there in total?", "+"),
    ("{name} has {a} {thing}s and gives away {b}. How many {thing}s are left?", "-"),
    ("A box holds {a} {thing}s. How many {thing}s do {b} boxes hold?", "*"),
)
THINGS = ("apple", "book", "coin", "pencil", "stone", "ticket", "egg", "lemon", "card", "shell")


def operands(rng: Random, operation: str) -> tuple[int, int, int]:
    """Two numbers and the result: sums to 3 digits, tables to 12, and 2-digit times 1-digit products."""
    if operation in "+-":
        top = rng.choice((20, 100, 100, 1000))
        a, b = rng.randrange(top), rng.randrange(top)
        return (a, b, a + b) if operation == "+" else (max(a, b), min(a, b), abs(a - b))
    a, b = (
        (rng.randint(2, 12), rng.randint(2, 12))
        if rng.random() < 0.5
        else (rng.randint(11, 99), rng.randint(2, 9))
    )
    if operation == "*":
        return (a, b, a * b) if rng.random() < 0.7 else (b, a, a * b)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return a * b, b, a


def arithmetic(rng: Random, persona: Persona) -> Exchange:
    """`What is 12 + 30?` is answered by `12 + 30 = 42`."""
    del persona
    if rng.random() < 0.12:
        return story(rng)
    operation = rng.choices("+-*/", (40, 30, 20, 10))[0]
    a, b, result = operands(rng, operation)
    question = rng.choice(OPERATIONS[operation]).format(a=a, b=b)
    if question[0].isalpha():
        question = typed(rng, question)
    return ask("arithmetic", question, f"{a} {operation} {b} = {result}")


def story(rng: Random) -> Exchange:
    """A one-step word problem with small numbers."""
    template, operation = rng.choice(STORIES)
    a, b = rng.randint(3, 40), rng.randint(2, 9)
    a = max(a, b + 1) if operation == "-" else a % 12 + 2 if operation == "*" else a
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    question = template.format(a=a, b=b, name=rng.choice(NAMES), thing=rng.choice(THINGS))
    return ask("arithmetic", question, f"{a} {operation} {b} = {result}")
