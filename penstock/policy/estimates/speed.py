"""How fast workers are, by kind, learned from what their requests did: the rates that a placement reckons
with.

    first output = fixed + tokens * a + computed * prompt * b + streams * c + tokens * streams * d
    step    = fixed + streams * e    (time per output token)
    service = how long a stream holds its place, on average

`tokens` are those of the prompt that are computed, and of the prompts that were sent there before it and not
computed yet: an engine mixes them in its steps, so the time of one alone (`Usage.prefill_ns`) counts some of
the others in and some of them not, and together with a backlog would count them twice. Until enough was seen
the configured rates are believed.
"""

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.estimates.online_linear_model import OnlineLinearModel
from penstock.policy.placement_terms import PlacementTerms

_PREFILL_UNITS = (1.0, 256.0, 2.0**18, 8.0, 8.0 * 256)
_STEP_UNITS = (1.0, 8.0)
_MEMORY = 0.98
_LEARN_EVERY_NS = 10 * NS_PER_MS
"""One request in this time is learned from, by kind: learning costs more than a decision."""
_SERVICE_PACE = 0.02
_SERVICE_MAX = 10.0
"""A stream counts as this many mean ones at most."""
_SERVICE_PRIOR_S = 2.0
_KINDS_MAX = 256
"""Kinds that are told apart; over it those that were learned first are forgotten."""


class Speed(msgspec.Struct, frozen=True, gc=False):
    """One kind of worker, in seconds."""

    fixed_s: float = 0.0
    """A prompt, however short."""
    token_s: float = 0.0
    """One more token of it."""
    pair_s: float = 0.0
    """One more token, for each token of the whole prompt: attention."""
    stream_s: float = 0.0
    """A stream that runs beside it."""
    token_stream_s: float = 0.0
    """The same, for each token."""
    step_s: float = 0.0
    """One output token of every stream."""
    step_stream_s: float = 0.0
    """The same, for each stream."""
    service_s: float = _SERVICE_PRIOR_S

    def prefill_s(self, tokens: int, prompt_tokens: int, streams: float) -> float:
        """Compute `tokens` of a prompt beside so many streams."""
        alone = self.fixed_s + tokens * (self.token_s + self.pair_s * prompt_tokens)
        return alone + streams * (self.stream_s + self.token_stream_s * tokens)

    def backlog_s(self, tokens: int, streams: int) -> float:
        """Compute the prompts of other requests, so many tokens in all."""
        return tokens * (self.token_s + self.token_stream_s * streams)

    def tpot_s(self, streams: int) -> float:
        """Time per output token with so many streams."""
        return self.step_s + self.step_stream_s * streams


class Ran(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one request took at its worker. Times are 0 where they are not known."""

    at_ns: int
    """Its end."""
    computed_tokens: int
    """Of its prompt."""
    prompt_tokens: int
    backlog_tokens: int = 0
    """Prompt tokens of others that were sent there before it and not computed yet."""
    streams: int = 0
    """Beside it, when it came."""
    first_ns: int = 0
    """From dispatch to first output."""
    waited: bool = False
    """It had to wait there for a place: `first_ns` says little about the worker."""
    step_ns: int = 0
    """Time per output token."""
    step_streams: int = 0
    """Streams while those were made, itself too."""
    service_ns: int = 0
    """From dispatch to its end."""


class _Kind:
    """One kind's laws, and what they say now."""

    __slots__ = ("_learned_ns", "_num_ended", "_prefill", "_service_s", "_step", "speed")

    def __init__(self, config: PlacementTerms) -> None:
        token_ns, step_ns = NS_PER_S / config.prefill_tokens_per_s, config.step_ms * NS_PER_MS
        self._prefill = OnlineLinearModel(
            _PREFILL_UNITS, memory=_MEMORY, prior=(0.0, token_ns, 0.0, 0.0, 0.0)
        )
        self._step = OnlineLinearModel(_STEP_UNITS, memory=_MEMORY, prior=(step_ns, 0.0))
        self._learned_ns: int | None = None
        self._num_ended = 0
        self._service_s = _SERVICE_PRIOR_S
        self.speed = self._read()

    def learn(self, ran: Ran) -> None:
        """Take in what one request took."""
        if ran.service_ns > 0:
            self._num_ended += 1
            service_s = ran.service_ns / NS_PER_S
            if self._num_ended > 1:
                service_s = min(service_s, _SERVICE_MAX * self._service_s)
            assert service_s > 0, service_s
            self._service_s += max(_SERVICE_PACE, 1 / self._num_ended) * (service_s - self._service_s)
        if self._learned_ns is not None and ran.at_ns < self._learned_ns + _LEARN_EVERY_NS:
            return
        self._learned_ns = ran.at_ns
        self._learn_prefill(ran)
        if ran.step_ns > 0:
            self._step.observe((1.0, ran.step_streams), ran.step_ns)
        self.speed = self._read()

    def _learn_prefill(self, ran: Ran) -> None:
        if ran.first_ns <= 0 or ran.waited:
            return
        computed = max(1, ran.computed_tokens)
        tokens = computed + ran.backlog_tokens
        terms = (1.0, tokens, computed * ran.prompt_tokens, ran.streams, tokens * ran.streams)
        self._prefill.observe(terms, ran.first_ns)

    def _read(self) -> Speed:
        prefill, step = self._prefill.coefficient, self._step.coefficient
        return Speed(
            fixed_s=prefill(0) / NS_PER_S,
            token_s=prefill(1) / NS_PER_S,
            pair_s=prefill(2) / NS_PER_S,
            stream_s=prefill(3) / NS_PER_S,
            token_stream_s=prefill(4) / NS_PER_S,
            step_s=step(0) / NS_PER_S,
            step_stream_s=step(1) / NS_PER_S,
            service_s=self._service_s,
        )


class Speeds:
    """The kinds of workers of one model."""

    __slots__ = ("_config", "_kinds")

    def __init__(self, config: PlacementTerms) -> None:
        self._config = config
        self._kinds: dict[str, _Kind] = {}

    def of(self, kind: str) -> Speed:
        """As far as is known."""
        found = self._kinds.get(kind)
        return (found or self._enter(kind)).speed

    def learn(self, kind: str, ran: Ran) -> None:
        """A request of a worker of this kind has ended."""
        (self._kinds.get(kind) or self._enter(kind)).learn(ran)

    def _enter(self, kind: str) -> _Kind:
        if len(self._kinds) >= _KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        found = self._kinds[kind] = _Kind(self._config)
        assert len(self._kinds) <= _KINDS_MAX, "the bound of kinds holds"
        return found
