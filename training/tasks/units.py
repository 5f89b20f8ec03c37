"""Unit conversions with whole-number answers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.tasks.base import Exchange, Persona, ask, typed


@dataclass(frozen=True)
class Conversion:
    """One `big` unit is `factor` `small` ones; questions go both ways with 1 to `top` big units."""

    big: str
    small: str
    factor: int
    top: int


CONVERSIONS = (
    Conversion("kilometres", "metres", 1000, 99),
    Conversion("metres", "centimetres", 100, 99),
    Conversion("centimetres", "millimetres", 10, 99),
    Conversion("kilograms", "grams", 1000, 99),
    Conversion("litres", "millilitres", 1000, 99),
    Conversion("tonnes", "kilograms", 1000, 99),
    Conversion("hours", "minutes", 60, 24),
    Conversion("minutes", "seconds", 60, 24),
    Conversion("days", "hours", 24, 14),
    Conversion("weeks", "days", 7, 30),
    Conversion("years", "months", 12, 20),
    Conversion("feet", "inches", 12, 20),
    Conversion("yards", "feet", 3, 40),
    Conversion("dollars", "cents", 100, 99),
    Conversion("kilobytes", "bytes", 1000, 99),
    Conversion("gigabytes", "megabytes", 1000, 99),
    Conversion("pounds", "ounces", 16, 12),
)

SHORT = {
    "kilometres": "km", "metres": "m", "centimetres": "cm", "millimetres": "mm", "kilograms": "kg",
    "grams": "g", "litres": "l", "millilitres": "ml", "tonnes": "t", "hours": "h", "minutes": "min",
    "seconds": "s", "kilobytes": "kB", "gigabytes": "GB", "megabytes": "MB",
}  # fmt: skip
AMERICAN = {"kilometres": "kilometers", "metres": "meters", "centimetres": "centimeters", "litres": "liters"}

PHRASINGS = (
    "Convert {n} {start} to {end}.", "How many {end} are {n} {start}?", "How many {end} are in {n} {start}?",
    "What is {n} {start} in {end}?", "{n} {start} in {end}", "{n} {start} to {end}", ("Express {n} {start} "
    "in {end}."),
    "How much is {n} {start} in {end}?", "Please convert {n} {start} into {end}.",
)  # fmt: skip

TEMPERATURES = (
    "Convert {n} {start} to {end}.", "What is {n} {start} in {end}?", "How much is {n} {start} in {end}?",
    "{n} {start} in {end}", "{n} {start} to {end}", "Please convert {n} {start} into {end}.",
)  # fmt: skip
SCALES = (("degrees Celsius", "degrees Fahrenheit"), ("Celsius", "Fahrenheit"), ("°C", "°F"), ("C", "F"))


def units(rng: Random, persona: Persona) -> Exchange:
    """`How many metres are 3 km?` is answered by `3 kilometres = 3000 metres`."""
    del persona
    if rng.random() < 0.12:
        return temperature(rng)
    conversion = rng.choice(CONVERSIONS)
    count = rng.randint(1, conversion.top)
    left, right = (count, conversion.big), (count * conversion.factor, conversion.small)
    if rng.random() < 0.35:
        left, right = right, left
    question = rng.choice(PHRASINGS).format(
        n=left[0], start=spelled(rng, *left), end=spelled(rng, 2, right[1])
    )
    question = question if any(letter.isupper() for letter in question[1:]) else typed(rng, question)
    answer = f"{left[0]} {singular(*left)} = {right[0]} {singular(*right)}"
    return ask("units", question, answer)


def temperature(rng: Random) -> Exchange:
    """Celsius to Fahrenheit in steps of five degrees, and back."""
    celsius = rng.randrange(-20, 105, 5)
    fahrenheit = celsius * 9 // 5 + 32
    start, end = rng.choice(SCALES)
    left, right = (celsius, "°C"), (fahrenheit, "°F")
    if rng.random() < 0.4:
        left, right, start, end = right, left, end, start
    question = rng.choice(TEMPERATURES).format(n=left[0], start=start, end=end)
    return ask("units", question, f"{left[0]} {left[1]} = {right[0]} {right[1]}")


def spelled(rng: Random, count: int, unit: str) -> str:
    """A unit's name as people write it: long, American or short."""
    draw = rng.random()
    if draw < 0.3 and unit in SHORT:
        return SHORT[unit]
    if draw < 0.5 and unit in AMERICAN:
        unit = AMERICAN[unit]
    return singular(count, unit)


def singular(count: int, unit: str) -> str:
    """The unit's form for this count."""
    if count != 1:
        return unit
    return {"feet": "foot", "inches": "inch"}.get(unit, unit[:-1])
