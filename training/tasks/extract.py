"""JSON extraction: a sentence in, a JSON object with given keys out."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from training.tasks.base import Exchange, Persona, ask, pick
from training.tasks.words import CITIES, COLOURS, FOODS, NAMES, WEEKDAYS

REQUESTS = (
    "Extract {keys} as JSON: {text}", "Extract the {keys} as JSON from this sentence: {text}",
    "Return JSON with {keys}: {text}", "Give me a JSON object with the keys {keys}: {text}",
    "{text} Extract {keys} as JSON.", "{text}\nReturn {keys} as JSON.", ("Turn this into JSON with {keys}: "
    "{text}"),
    "Read this and answer in JSON with {keys}.\n{text}",
)  # fmt: skip
JOBS = (
    "teacher",
    "doctor",
    "farmer",
    "baker",
    "pilot",
    "nurse",
    "lawyer",
    "writer",
    "driver",
    "cook",
    "singer",
)
THINGS = (
    "car",
    "bike",
    "house",
    "phone",
    "lamp",
    "table",
    "chair",
    "jacket",
    "bag",
    "boat",
    "guitar",
    "camera",
)

Kind = Callable[[Random], tuple[str, dict[str, Any]]]


def person(rng: Random) -> tuple[str, dict[str, Any]]:
    """A name, an age and a city."""
    values = {"name": rng.choice(NAMES), "age": rng.randint(5, 95), "city": rng.choice(CITIES)}
    forms = (
        "{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.",
        "My name is {name}, I am {age} years old and I live in {city}.", ("{name} from {city} is {age} years "
        "old."),
        "In {city} lives {name}, who is {age}.", "{name} is {age} and comes from {city}.",
    )  # fmt: skip
    return pick(rng, forms, **values), values


def worker(rng: Random) -> tuple[str, dict[str, Any]]:
    """A name, a job and a city."""
    values = {"name": rng.choice(NAMES), "job": rng.choice(JOBS), "city": rng.choice(CITIES)}
    forms = (
        "{name} works as a {job} in {city}.", "{name} is a {job} from {city}.", ("{name}, a {job}, lives in "
        "{city}."),
        "The {job} {name} lives in {city}.", "In {city}, {name} works as a {job}.",
    )  # fmt: skip
    return pick(rng, forms, **values), values


def order(rng: Random) -> tuple[str, dict[str, Any]]:
    """An item, a number and a price."""
    values = {"item": rng.choice(FOODS), "quantity": rng.randint(2, 20), "price": rng.randint(1, 99)}
    forms = (
        "{quantity} x {item} for {price} dollars.", ("I bought {quantity} portions of {item} for {price} "
        "dollars."),
        "Please send {quantity} of {item}, {price} dollars in total.", ("The {item} costs {price} dollars "
        "for {quantity}."),
    )  # fmt: skip
    return pick(rng, forms, **values), values


def meeting(rng: Random) -> tuple[str, dict[str, Any]]:
    """A name, a day and a time."""
    time = f"{rng.randint(8, 19)}:{rng.choice(('00', '15', '30', '45'))}"
    values = {"name": rng.choice(NAMES), "day": rng.choice(WEEKDAYS), "time": time}
    forms = (
        "The meeting with {name} is on {day} at {time}.", "I meet {name} on {day} at {time}.",
        "{name} has an appointment on {day} at {time}.", "On {day} at {time} I will see {name}.",
        "Call {name} at {time} on {day}.", "{day} {time}: lunch with {name}.",
    )  # fmt: skip
    return pick(rng, forms, **values), values


def thing(rng: Random) -> tuple[str, dict[str, Any]]:
    """A thing, its colour and its price."""
    values = {"item": rng.choice(THINGS), "color": rng.choice(COLOURS), "price": rng.randint(2, 999)}
    forms = (
        "The {color} {item} costs {price} dollars.", "I paid {price} dollars for a {color} {item}.",
        "A {color} {item} is on sale for {price} dollars.", "For sale: {item}, {color}, {price} dollars.",
    )  # fmt: skip
    return pick(rng, forms, **values), values


def trip(rng: Random) -> tuple[str, dict[str, Any]]:
    """A start, an end and a day."""
    start, end = rng.sample(CITIES, 2)
    values = {"from": start, "to": end, "day": rng.choice(WEEKDAYS)}
    forms = (
        "I fly from {from} to {to} on {day}.", "The train from {from} to {to} leaves on {day}.",
        "On {day} we travel from {from} to {to}.", "A ticket from {from} to {to}, {day}.",
        "We go to {to} from {from} on {day}.",
    )  # fmt: skip
    return pick(rng, forms, **values), values


KINDS: tuple[Kind, ...] = (person, person, worker, order, meeting, thing, trip)


def extract(rng: Random, persona: Persona) -> Exchange:
    """All keys or two of them, in the order in which they are asked for."""
    del persona
    text, values = rng.choice(KINDS)(rng)
    keys = list(values)
    if rng.random() < 0.3:
        keys = rng.sample(keys, 2)
    listed = ", ".join(keys[:-1]) + rng.choice((" and ", ", ")) + keys[-1]
    answer = json.dumps({key: values[key] for key in keys})
    return ask("extract", pick(rng, REQUESTS, keys=listed, text=text), answer)
