"""Which requests are let in, and which model answers: the sections `admission` and `routing`."""

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch
from penstock.types import VERSIONED

Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]
Weight = Annotated[float, Meta(ge=0, le=1)]


TTFT_TARGET_MS, TPOT_TARGET_MS = 500.0, 50.0
"""The promise to every request, unless the configuration says otherwise."""


class TtftTarget(Branch, frozen=True, kw_only=True):
    """The promise to one band, one tier, or one tier within one band."""

    band: str = ""
    """Empty: every band."""
    tier: str = ""
    """Empty: every tier."""
    ttft_ms: Milliseconds | None = None
    """Time to first token; 0 promises none: such requests wait as long as the queue allows. Null: the next
    wider promise."""
    tpot_ms: Milliseconds | None = None
    """Time per output token after the first; 0 promises none. Null: the next wider promise."""


class AdmissionConfig(Branch, frozen=True, kw_only=True):
    """Whether a request is let in, by the time to first token that it can expect. docs/overload.md has the
    story.
    """

    ttft_target_ms: Milliseconds = TTFT_TARGET_MS
    """The time to first token that every request is promised: one that cannot have it is diverted or refused.
    0 promises none, and only the queue's own bound on waiting counts."""
    tpot_target_ms: Milliseconds = TPOT_TARGET_MS
    """The time per output token after the first that every request is promised; 0 promises none."""
    targets: Annotated[tuple[TtftTarget, ...], Meta(max_length=256)] = (
        TtftTarget(tier="interactive", ttft_ms=200.0),
        TtftTarget(band="bulk", ttft_ms=5000.0),
    )
    """Other promises. The one that names the band and the tier goes before the one that names the tier, and
    that before the one that names the band."""


class ModelRoute(Branch, frozen=True, kw_only=True):
    """The models that may replace one model."""

    model: str
    """Its name, as clients use it."""
    fallback: str = ""
    """The next smaller model; empty: none. Its own fallback comes after it."""
    tools: bool = True
    """Whether it can call tools. Requests with tools never go to a fallback that cannot."""
    data: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Words for what the model may be trusted with or where it runs ("eu", "health"). A fallback must have
    all of them."""


class AutoModel(Branch, frozen=True, kw_only=True):
    """One model that `model: "auto"` may choose."""

    model: str
    """Its name, as clients use it."""
    up_to: Weight = 1.0
    """It answers requests of at most this complexity, unless a smaller model does. The last one answers the
    rest."""
    tiers: Annotated[tuple[str, ...], Meta(max_length=256)] = ()
    """Tiers that get no smaller model than this one."""


class PlacementConfig(Branch, frozen=True, kw_only=True):
    """Which worker a request goes to: filter, score, pick. docs/routing.md has the story."""

    policy: Literal["ttft", "weighted", "least_loaded"] = "ttft"
    """"ttft": the least expected time to first token. "weighted": a weighted sum of four marks.
    "least_loaded": free streams alone."""


class RoutingConfig(Branch, frozen=True, kw_only=True):
    """Which model answers instead of which, and what "auto" is."""

    models: Annotated[tuple[ModelRoute, ...], Meta(max_length=64)] = ()
    """Models that may be replaced, or that lack something."""
    auto: Annotated[tuple[AutoModel, ...], Meta(max_length=16)] = ()
    """`model: "auto"`: the model is chosen by how complex the request looks (docs/routing.md), among these,
    from small to large. Empty: there is no "auto"."""
    placement: PlacementConfig = PlacementConfig()


class EnsembleConfig(Branch, frozen=True, kw_only=True):
    """A model with a step of your own before it, after it, or both, under a name like a model's.

    docs/ensembles.md has an example.
    """

    name: str
    """The name that clients ask for."""
    model: str
    """The model that answers: a model, or an adapter of one."""
    before: str = ""
    """`module:function`, called with the request; returns the one that the model gets."""
    after: str = ""
    """`module:function`, called with the answer and the request; returns the answer that the client gets."""
    path: str = ""
    """The directory with the modules; empty: they are installed."""
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Each call may take so long; then its process is ended, and the request with 500."""
    memory_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    """The memory that the steps may take beyond that of importing them."""


AUTO = "auto"
"""The name that asks for a choice of the model, listed in /v1/models."""


def routing_problems(
    routing: RoutingConfig, admission: AdmissionConfig, known: Sequence[str]
) -> Iterator[str]:
    """One line for each thing that is wrong between settings that are fine alone; `known` are the names of
    the models.
    """
    yield from _route_problems(routing.models, known)
    yield from _auto_problems(routing.auto, known)
    yield from _target_problems(admission)


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


def _auto_problems(auto: Sequence[AutoModel], known: Sequence[str]) -> Iterator[str]:
    names = [model.model for model in auto]
    for i, name in enumerate(names):
        yield from _unknown(f"routing.auto[{i}].model", name, known)
        if name in names[:i]:
            yield f"routing.auto[{i}].model: {name!r} is there twice"
    cuts = [model.up_to for model in auto[:-1]]
    if any(later <= earlier for earlier, later in pairwise(cuts)):
        yield "routing.auto: `up_to` must rise from each model to the next"
    if names and AUTO in known:
        yield f"routing.auto: {AUTO!r} is the name of a model, and of the choice between them"
    tiers = [tier for model in auto for tier in model.tiers]
    for tier in sorted({tier for tier in tiers if tiers.count(tier) > 1}):
        yield f"routing.auto: the tier {tier!r} stands at two models"


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


_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def ensemble_problems(
    ensembles: Sequence[EnsembleConfig], models: Sequence[str], adapters: Sequence[str]
) -> Iterator[str]:
    """One line for each thing that is wrong; `models` and `adapters` are the names that there are."""
    seen: set[str] = {*models, *adapters}
    for i, ensemble in enumerate(ensembles):
        key = f"ensembles[{i}]"
        if not re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,256}", ensemble.name) or VERSIONED.fullmatch(
            ensemble.name
        ):
            wanted = "1 to 256 characters without white space or a version"
            yield f"{key}.name: expected {wanted}, got {ensemble.name!r}"
        elif ensemble.name in seen or ensemble.name == AUTO:
            yield f"{key}.name: {ensemble.name!r} is the name of something else already"
        seen.add(ensemble.name)
        if ensemble.model != AUTO:
            yield from _unknown(f"{key}.model", ensemble.model, [*models, *adapters])
        if not ensemble.before and not ensemble.after:
            yield f"{key}.before: neither before nor after is given, so it would be the model itself"
        for field, entry in (("before", ensemble.before), ("after", ensemble.after)):
            if entry and not _ENTRY.fullmatch(entry):
                yield f"{key}.{field}: expected module:function, got {entry[:80]!r}"


_PLACEMENT = "a constant of placement now (penstock/policy/terms.py)"
_ADMISSION = "a constant of admission now (penstock/policy/admission/admit.py)"
_COMPLEXITY = "a constant now (penstock/policy/extras/complexity.py)"
RETIRED: dict[str, str] = {
    "routing.placement.ttft.*": _PLACEMENT,
    "routing.placement.weighted.*": _PLACEMENT,
    **{
        f"routing.placement.{key}": _PLACEMENT
        for key in (
            "holders_max", "least_loaded", "tie", "explore", "hold_ms_max", "holds_max", "host_cost",
            "adapter_load_ms", "prefill_tokens_per_s", "step_ms", "session_ttl_s", "sessions_max",
            "decisions_kept", "log_every",
        )
    },
    **{
        f"admission.{key}": _ADMISSION
        for key in (
            "idle_factor", "prefer_fraction", "prefer_saves_ms", "retry_after_max_s",
            "retry_after_default_s", "retries_kept",
        )
    },
    "admission.max_wait_ms_max": "a constant now: ten minutes",
    "routing.auto.models": "the list is `routing.auto` itself",
    "routing.auto.tiers": "now `routing.auto[].tiers`",
    "routing.auto[].cost": "`routing.auto[].up_to` says it all",
    "routing.auto.name": "the name is always auto",
    "routing.auto.weights.*": _COMPLEXITY,
    **{
        f"routing.auto.{key}": _COMPLEXITY
        for key in ("tokens_full", "turns_full", "text_chars_max", "cost_bias")
    },
}  # fmt: skip
