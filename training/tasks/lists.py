"""Sequences: counting, letters, days, months, tables.

Their answers are the longest, so they show streaming well.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from string import ascii_uppercase

from training.tasks.base import Exchange, Persona, ask, pick, typed
from training.tasks.words import MONTHS, WEEKDAYS


def count_up(rng: Random) -> tuple[str, str]:
    """From one number to a higher one."""
    start = 1 if rng.random() < 0.5 else rng.randint(2, 60)
    end = start + rng.choice((4, 9, rng.randint(3, 30)))
    forms = ("Count from {a} to {b}.", "Count up from {a} to {b}.", "Write the numbers from {a} to {b}.",
             "List the numbers from {a} to {b}.", "Can you count from {a} to {b}?")  # fmt: skip
    if start == 1:
        forms += ("Count to {b}.", "Can you count to {b}?")
    return pick(rng, forms, a=start, b=end), ", ".join(map(str, range(start, end + 1)))


def count_down(rng: Random) -> tuple[str, str]:
    """From a number down to one."""
    start = rng.randint(3, 30)
    forms = (
        "Count down from {}.",
        "Count backwards from {}.",
        "Count down from {} to 1.",
        "Make a countdown from {}.",
    )
    return rng.choice(forms).format(start), ", ".join(map(str, range(start, 0, -1)))


def steps(rng: Random) -> tuple[str, str]:
    """Multiples of a small number."""
    step, count = rng.randint(2, 12), rng.randint(3, 12)
    forms = ("List the first {count} multiples of {step}.", "Write the first {count} multiples of {step}.",
             "What are the first {count} multiples of {step}?",
             "Count in steps of {step} up to {end}.")  # fmt: skip
    question = pick(rng, forms, count=count, step=step, end=count * step)
    return question, ", ".join(str(step * factor) for factor in range(1, count + 1))


def parity(rng: Random) -> tuple[str, str]:
    """The first even or odd numbers."""
    count, even = rng.randint(2, 20), rng.random() < 0.5
    forms = ("List the first {count} {name} numbers.", "Write the first {count} {name} numbers.",
             "What are the first {count} {name} numbers?")  # fmt: skip
    first = 2 if even else 1
    numbers = range(first, first + 2 * count, 2)
    return pick(rng, forms, count=count, name="even" if even else "odd"), ", ".join(map(str, numbers))


def days(rng: Random) -> tuple[str, str]:
    """The days of the week, or the one beside another."""
    day = rng.choice(WEEKDAYS)
    index, draw = WEEKDAYS.index(day), rng.random()
    if draw < 0.3:
        forms = ("List the days of the week.", "Name the days of the week.", "What are the days of the week?",
                 "Which days does a week have?")  # fmt: skip
        return rng.choice(forms), ", ".join(WEEKDAYS)
    if draw < 0.65:
        forms = ("Which day comes after {}?", "What day comes after {}?", "What is the day after {}?")
        return rng.choice(forms).format(day), WEEKDAYS[(index + 1) % 7]
    forms = ("Which day comes before {}?", "What day comes before {}?", "What is the day before {}?")
    return rng.choice(forms).format(day), WEEKDAYS[(index - 1) % 7]


def months(rng: Random) -> tuple[str, str]:
    """The months of the year, or the one beside another."""
    month = rng.choice(MONTHS)
    index, draw = MONTHS.index(month), rng.random()
    if draw < 0.3:
        forms = ("List the months of the year.", "Name the months of the year.", ("What are the months of "
        "the year?"),
                 "Which months does a year have?")  # fmt: skip
        return rng.choice(forms), ", ".join(MONTHS)
    if draw < 0.65:
        forms = ("Which month comes after {}?", "What month comes after {}?", "What is the month after {}?")
        return rng.choice(forms).format(month), MONTHS[(index + 1) % 12]
    forms = ("Which month comes before {}?", "What month comes before {}?", "What is the month before {}?")
    return rng.choice(forms).format(month), MONTHS[(index - 1) % 12]


def letters(rng: Random) -> tuple[str, str]:
    """The alphabet, whole or in part."""
    if rng.random() < 0.3:
        forms = (
            "Write the alphabet.",
            "Say the alphabet.",
            "List the letters of the alphabet.",
            "Recite the alphabet.",
        )
        return rng.choice(forms), " ".join(ascii_uppercase)
    start = rng.randint(0, 22)
    end = rng.randint(start + 2, 25)
    forms = (
        "List the letters from {a} to {b}.",
        "Write the letters from {a} to {b}.",
        "Which letters go from {a} to {b}?",
    )
    return pick(rng, forms, a=ascii_uppercase[start], b=ascii_uppercase[end]), " ".join(
        ascii_uppercase[start : end + 1]
    )


def table(rng: Random) -> tuple[str, str]:
    """A multiplication table, one product per line."""
    factor = rng.randint(2, 12)
    forms = ("Write the multiplication table of {}.", "Show me the {} times table.", ("Write the {} times "
    "table."),
             "What is the multiplication table of {}?", "List the {} times table.")  # fmt: skip
    lines = (f"{factor} x {other} = {factor * other}" for other in range(1, 11))
    return rng.choice(forms).format(factor), "\n".join(lines)


KINDS: tuple[Callable[[Random], tuple[str, str]], ...] = (
    count_up, count_up, count_down, steps, parity, days, months, letters, table,
)  # fmt: skip


def lists(rng: Random, persona: Persona) -> Exchange:
    """One of the kinds above."""
    del persona
    question, answer = rng.choice(KINDS)(rng)
    if "letters from" in question or "letters go" in question:
        return ask("lists", question, answer)
    return ask("lists", typed(rng, question), answer)
