"""Which requests are let in, and which model answers: the sections `admission` and `routing`."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Fraction, Positive
from penstock.config.placement import PlacementConfig

Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]
Weight = Annotated[float, Meta(ge=0, le=1)]


TTFT_TARGET_MS, TPOT_TARGET_MS = 500.0, 50.0
"""What is promised to every request, unless the configuration says otherwise."""


class TtftTarget(Branch, frozen=True, kw_only=True):
    """The promise to one band, one tier, or one tier within one band."""

    band: str = ""
    """Empty: every band."""
    tier: str = ""
    """Empty: every tier."""
    ttft_ms: Milliseconds | None = None
    """Time to first token; 0 promises none: such requests wait as long as the queue allows. Null: the next wider promise."""
    tpot_ms: Milliseconds | None = None
    """Time per output token after the first; 0 promises none. Null: the next wider promise."""


class AdmissionConfig(Branch, frozen=True, kw_only=True):
    """Whether a request is let in, by the time to first token that it can expect. docs/overload.md has the story."""

    ttft_target_ms: Milliseconds = TTFT_TARGET_MS
    """The time to first token that every request is promised: one that cannot have it is diverted or refused. 0 promises none, and
    only the queue's own bound on waiting counts."""
    tpot_target_ms: Milliseconds = TPOT_TARGET_MS
    """The time per output token after the first that every request is promised; 0 promises none."""
    idle_factor: Annotated[float, Meta(ge=1, le=100)] = 2.5
    """No promise is shorter than this many times what the same request takes on an idle worker, as measured: what a long prompt or a
    slow machine is promised."""
    targets: Annotated[tuple[TtftTarget, ...], Meta(max_length=256)] = (
        TtftTarget(tier="interactive", ttft_ms=200.0),
        TtftTarget(band="bulk", ttft_ms=5000.0),
    )
    """Other promises. The one that names the band and the tier goes before the one that names the tier, and that
    before the one that names the band."""
    prefer_fraction: Fraction = 0.5
    """`prefer` diverts when the smaller model's first token is expected within this share of the larger one's time."""
    prefer_saves_ms: Milliseconds = 200.0
    """And when that saves at least so much."""
    retry_after_max_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    retry_after_default_s: Annotated[float, Meta(ge=1, le=3600)] = 2.0
    """What a refused client is told while nothing is known of how fast the queue drains."""
    retries_kept: Positive = 4096
    """Tenants and models whose promised times to come back are kept, so that those do not all come back at once."""
    max_wait_ms_max: Annotated[int, Meta(ge=1, le=86_400_000)] = 600_000
    """Bound on the header `x-penstock-max-wait-ms`."""


class ModelRoute(Branch, frozen=True, kw_only=True):
    """What one model may be replaced by."""

    model: str
    """Its name, as clients use it."""
    fallback: str = ""
    """The next smaller model; empty: none. Its own fallback comes after it."""
    tools: bool = True
    """Whether it can call tools. Requests with tools never go to a fallback that cannot."""
    data: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Words for what the model may be trusted with or where it runs ("eu", "health"). A fallback must have all of them."""


class AutoModel(Branch, frozen=True, kw_only=True):
    """One model that `model: "auto"` may choose."""

    model: str
    """Its name, as clients use it."""
    up_to: Weight = 1.0
    """It answers requests of at most this complexity, unless a smaller model does. The last one answers the rest."""
    cost: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    """Of a token, relative to the other models."""


class AutoTier(Branch, frozen=True, kw_only=True):
    """What `auto` means for one tier."""

    tier: str
    model_min: str
    """It gets this model or a larger one."""


class ComplexityWeights(Branch, frozen=True, kw_only=True):
    """How much each mark of a request counts towards its complexity, which is their sum, cut at 1."""

    tokens: Weight = 0.15
    """Length of the conversation."""
    code: Weight = 0.3
    """Code in it, or asked for."""
    reasoning: Weight = 0.5
    """Proof, analysis, comparison, planning, calculation, constraints."""
    tools: Weight = 0.25
    """Tools defined, called and answered."""
    turns: Weight = 0.1
    """Turns of the conversation."""
    question: Weight = 0.5
    """The shape of the last message: its length, requirements, several questions, numbers and lists."""
    simple: Weight = 0.3
    """Taken off for greetings, thanks, look-ups, translations, summaries and extractions."""


class AutoConfig(Branch, frozen=True, kw_only=True):
    """`model: "auto"`: the model is chosen by how complex the request looks. docs/routing.md has the story."""

    models: Annotated[tuple[AutoModel, ...], Meta(max_length=16)] = ()
    """From small to large. Empty: there is no "auto"."""
    name: str = "auto"
    """The name that asks for it, listed in /v1/models."""
    tiers: Annotated[tuple[AutoTier, ...], Meta(max_length=256)] = ()
    """Tiers that get no less than a certain model."""
    weights: ComplexityWeights = ComplexityWeights()
    tokens_full: Positive = 2048
    """Prompt tokens that count as long: the whole of `weights.tokens`."""
    turns_full: Positive = 8
    """Turns that count as many."""
    text_chars_max: Positive = 8192
    """Characters of a request's text that are looked at: of the last user message first, then of those before it."""
    cost_bias: Weight = 0.05
    """How much further the bounds of a model reach where the next one costs ten times as much."""


class RoutingConfig(Branch, frozen=True, kw_only=True):
    """Which model answers instead of which, and what "auto" is."""

    models: Annotated[tuple[ModelRoute, ...], Meta(max_length=64)] = ()
    auto: AutoConfig = AutoConfig()
    placement: PlacementConfig = PlacementConfig()
