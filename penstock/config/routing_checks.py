"""What is wrong between the settings of `admission` and `routing`, each of which is fine alone."""

import difflib
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.config.presets import served_name
from penstock.config.routing import AdmissionConfig, AutoConfig, ModelRoute
from penstock.config.tree import Config

AUTO = "auto"
"""The name that asks for a choice of the model, listed in /v1/models."""


def routing_problems(config: Config) -> Iterator[str]:
    """One line for each thing that is wrong."""
    known = [served_name(model) for model in config.models]
    yield from _route_problems(config.routing.models, known)
    yield from _auto_problems(config.routing.auto, known)
    yield from _target_problems(config.admission)


def _route_problems(routes: Sequence[ModelRoute], known: Sequence[str]) -> Iterator[str]:
    next_of: dict[str, str] = {}
    for i, route in enumerate(routes):
        key = f"routing.models[{i}]"
        yield from _unknown(f"{key}.model", route.model, known)
        if route.model in next_of:
            yield f"{key}.model: {route.model!r} is there twice"
        elif route.fallback:
            yield from _unknown(f"{key}.fallback", route.fallback, known)
        next_of.setdefault(route.model, route.fallback)
    for i, route in enumerate(routes):
        if loop := _loop(route.model, next_of):
            yield f"routing.models[{i}].fallback: goes in a circle: {' -> '.join(loop)}"
            return  # The others of the circle would say the same.


def _loop(start: str, next_of: dict[str, str]) -> list[str]:
    """The way from `start` back to itself; empty if there is none."""
    way = [start]
    for _ in next_of:
        way.append(next_of.get(way[-1], ""))
        if way[-1] == start:
            return way
    return []


def _auto_problems(auto: AutoConfig, known: Sequence[str]) -> Iterator[str]:
    names = [model.model for model in auto.models]
    for i, name in enumerate(names):
        yield from _unknown(f"routing.auto.models[{i}].model", name, known)
        if name in names[:i]:
            yield f"routing.auto.models[{i}].model: {name!r} is there twice"
    cuts = [model.up_to for model in auto.models[:-1]]
    if any(later <= earlier for earlier, later in pairwise(cuts)):
        yield "routing.auto.models: `up_to` must rise from each model to the next"
    if names and AUTO in known:
        yield f"routing.auto.models: {AUTO!r} is the name of a model, and of the choice between them"
    for tier, least in auto.tiers.items():
        yield from _unknown(f"routing.auto.tiers.{tier}", least, names)


def _target_problems(admission: AdmissionConfig) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for i, target in enumerate(admission.targets):
        if not (target.band or target.tier):
            yield f"admission.targets[{i}]: names neither a band nor a tier; ttft_target_ms is for all"
        elif (target.band, target.tier) in seen:
            yield f"admission.targets[{i}]: band {target.band!r} with tier {target.tier!r} is there twice"
        seen.add((target.band, target.tier))


def _unknown(key: str, name: str, known: Sequence[str]) -> Iterator[str]:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        yield f"{key}: no model {name!r} here{meant}"
