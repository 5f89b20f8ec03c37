"""How long will something take? Models that learn online from what was measured: how long answers are
(`OutputLengths`), and how fast workers are (`Speeds`).
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import mul

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.branch import extended
from penstock.config.flow import LimitsConfig
from penstock.policy.terms import PlacementTerms
from penstock.types import TenantId

# How long an answer will be: what is reserved for it before a token of it exists.
#
# The estimate is the smaller of `max_tokens` and the 90th percentile of the tenant's last 64 answers of
# that model, taken exactly (nearest rank over a ring that is also kept sorted). A sketch such as P-square
# (Jain and Chlamtac, 1985) or a decaying histogram would take less memory, but answers with a bias when
# the load changes, and no two people predict the same number from one; this one can be checked with a
# pencil, and forgets after 64 answers for sure.
#
# The high percentile is chosen so that nine of ten answers need no renewal, while a tenant that always
# sends a huge `max_tokens` and gets short answers is not held to what it never uses. A tenant without a
# past is taken for an average one: the window of all tenants' answers of that model; without that too, a
# default.

AMOUNT_MAX = 2**32 - 1
"""The largest that a window can hold."""


class QuantileWindow:
    """The last `size` amounts, and the same in order.

    An amount is added in O(log size) and a copy of at most the window.
    """

    __slots__ = ("_next", "_ring", "_size", "_sorted", "count")

    def __init__(self, size: int) -> None:
        self._size, self._next = size, 0
        self._ring, self._sorted = array("I"), array("I")
        self.count = 0
        """How many amounts it has."""

    def add(self, amount: int) -> None:
        """From 0 to `AMOUNT_MAX`; the oldest makes room."""
        if self.count < self._size:
            self._ring.append(amount)
            self.count += 1
        else:
            oldest = self._ring[self._next]
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._ring[self._next] = amount
            self._next = (self._next + 1) % self._size
        insort(self._sorted, amount)

    def quantile(self, share: float) -> int:
        """The smallest amount that at least `share` of the window does not exceed (nearest rank).

        The window is not empty.
        """
        return nearest_rank(self._sorted, share)

    def amounts(self) -> Sequence[int]:
        """All of them, smallest first."""
        return self._sorted


def nearest_rank(amounts: Sequence[int], share: float) -> int:
    """The smallest of some sorted amounts (one at least) that at least `share` of them do not exceed."""
    count = len(amounts)
    assert count, "no amounts have no quantile"
    rank = -int(-share * count // 1)
    return amounts[(rank if rank < count else count) - 1 if rank > 1 else 0]


_SAMPLES_MIN = 8
"""Answers that a window must have seen before it is believed."""
_EVERYBODY = TenantId("\0everybody")
"""Key of the window over all tenants of a model; no tenant has such a name, since names are printable."""


class LengthTerms(LimitsConfig, frozen=True, kw_only=True):
    """The tokens reserved for an answer."""

    output_quantile: float = 0.9
    """This quantile of the tenant's last answers of that model, or `max_tokens` if less."""
    output_window: int = 64
    """Answers that the quantile is taken of."""
    output_windows_max: int = 8192
    """Pairs of tenant and model whose answers are remembered (about 0.7 KB each)."""
    output_tokens_default: int = 256
    """The tokens reserved while no answer of that model was seen."""


class OutputLengths:
    """Recent answers' lengths by tenant and model. Bounded: the pair that was seen longest ago makes room."""

    __slots__ = ("_config", "_windows")

    def __init__(self, config: LimitsConfig) -> None:
        self._config = extended(config, LengthTerms)
        self._windows: dict[tuple[TenantId, str], QuantileWindow] = {}

    def expect(self, tenant: TenantId, model: str, max_tokens: int) -> int:
        """Tokens to reserve for one answer of at most `max_tokens`; at least 1."""
        assert max_tokens >= 1, max_tokens
        window = self._windows.get((tenant, model))
        if window is None or window.count < _SAMPLES_MIN:
            window = self._windows.get((_EVERYBODY, model))
        if window is None or window.count < _SAMPLES_MIN:
            return min(max_tokens, self._config.output_tokens_default)
        return max(1, min(max_tokens, window.quantile(self._config.output_quantile)))

    def observe(self, tenant: TenantId, model: str, num_tokens: int) -> None:
        """An answer ended after `num_tokens`, whatever ended it: what was used is what the next one is likely
        to use.
        """
        length, windows = min(num_tokens, AMOUNT_MAX), self._windows
        for key in ((tenant, model), (_EVERYBODY, model)):
            # Moved to the end of the line of those that make room.
            windows[key] = window = windows.pop(key, None) or self._window()
            window.add(length)

    def __len__(self) -> int:
        """Pairs that are remembered, those of all tenants together included."""
        return len(self._windows)

    def _window(self) -> QuantileWindow:
        """A new pair's, for which there is room now."""
        while len(self._windows) >= self._config.output_windows_max:
            del self._windows[next(iter(self._windows))]
        return QuantileWindow(self._config.output_window)


# How fast workers are, by kind, learned from what their requests did: the rates that a placement reckons
# with.
#
#     first output = fixed + tokens * a + computed * prompt * b + streams * c + tokens * streams * d
#     step    = fixed + streams * e    (time per output token)
#     service = how long a stream holds its place, on average
#
# `tokens` are those of the prompt that are computed, and of the prompts that were sent there before it
# and not computed yet: an engine mixes them in its steps, so the time of one alone (`Usage.prefill_ns`)
# counts some of the others in and some of them not, and together with a backlog would count them twice.
# Until enough was seen the configured rates are believed.
#
# Each law is an online linear model with coefficients that are never negative (`OnlineLinearModel`),
# learned one observation at a time, and knows nothing of what its terms mean:
#
#     value: the sum of each coefficient times its term
#
# It is recursive least squares of relative errors, kept as information (normal equations), with three
# changes: what deviates more than is usual weighs less (Huber, "Robust Estimation of a Location
# Parameter", 1964), old knowledge fades only where new knowledge comes in (directional forgetting: Cao
# and Schwartz, "A directional forgetting algorithm based on the decomposition of the information matrix",
# Automatica 2000), and coefficients stay at zero or above (coordinate descent on the normal equations,
# warm from the last solution), so that more of anything never predicts less.

_RIDGE = 1e-3
"""Pull towards the prior, in units of one observation: decides only what nothing has shown yet."""
_OWN_MIN = _RIDGE * 1e-3
_SWEEPS = 4
"""Rounds of coordinate descent per observation, at most. The solution moves little from one to the next."""
_STILL = 1e-6
"""A round that moves no coefficient by more than this share of itself is the last."""
_HUBER = 2.0
"""Deviations over this many times the usual one count in proportion, not squared: about 1.35 standard
deviations of a normal error, where Huber's estimate is 95 % as good as the mean."""
_USUAL_MIN = 0.02
"""The usual deviation is never taken for less: else a change after a quiet hour would be taken for
outliers."""
_USUAL_PACE = 0.05
_FIRST = 8
"""Observations before the law's own expectation sets the scale of errors."""

Vector = list[float]


class OnlineLinearModel:
    """The law and what it was learned from.

    Terms and values are numbers of any unit, the same at every call.
    """

    __slots__ = (
        "_coefficients", "_count", "_information", "_law", "_memory", "_target", "_unit", "_units", "_usual",
    )  # fmt: skip

    def __init__(
        self, units: Sequence[float], *, memory: float, prior: Sequence[float] | None = None
    ) -> None:
        """`units`: about how large each term is, for conditioning.

        `memory`: what remains of knowledge about a load when one more observation of it comes in. `prior`:
        coefficients that are believed before any are seen.
        """
        assert 0 < memory < 1
        terms = range(len(units))
        self._units = [1 / unit for unit in units]
        self._memory = memory
        self._unit = 0.0  # About the first value: makes the numbers independent of the machine's speed.
        self._law = [0.0 for _ in terms] if prior is None else list(prior)
        self._coefficients = [known * unit for known, unit in zip(self._law, units, strict=True)]
        self._information: list[Vector] = [[_RIDGE * (i == j) for j in terms] for i in terms]
        self._target = [_RIDGE * known for known in self._coefficients]
        self._usual = 0.25
        self._count = 0

    @property
    def num_observed(self) -> int:
        """Observations taken in so far."""
        return self._count

    def predict(self, terms: Sequence[float]) -> float:
        """The value at these terms; what the prior says before the first observation."""
        return sum(map(mul, map(mul, terms, self._units), self._coefficients)) * (self._unit or 0.0)

    @property
    def coefficients(self) -> Sequence[float]:
        """The part of the value that one unit of each term adds. To read."""
        return self._law

    def observe(self, terms: Sequence[float], value: float) -> None:
        """Learn that `terms` gave `value` (0 or more).

        Errors count relative to the value expected.
        """
        assert value >= 0
        if not self._unit:
            # A prior is a statement about values as such, so it is kept when the unit becomes known.
            self._unit = max(value, 1.0)
            self._coefficients = [known / self._unit for known in self._coefficients]
            self._target = [known / self._unit for known in self._target]
        expected = self.predict(terms)
        scale = max(expected, value / 4) if self._count >= _FIRST else value
        scale = max(scale, self._unit * 1e-3)
        deviation = abs(value - expected) / scale
        trust = min(1.0, _HUBER * self._usual / deviation) if deviation and self._count >= _FIRST else 1.0
        self._usual += _USUAL_PACE * (min(deviation, 3 * self._usual) - self._usual)
        self._usual = max(self._usual, _USUAL_MIN)
        weight = self._unit / scale
        self._take([t * u * weight for t, u in zip(terms, self._units, strict=True)], value / scale, trust)
        self._count += 1

    def _take(self, row: Vector, right: float, trust: float) -> None:
        """One weighted equation: fade what was known along the row, add the row, move towards the
        solution.
        """
        image = [sum(map(mul, line, row)) for line in self._information]
        known = sum(map(mul, row, image))
        fade = (1 - self._memory) * trust / known if known > 0 else 0.0
        along = fade * sum(map(mul, row, self._target))
        self._target = [
            t + trust * right * r - along * i for t, r, i in zip(self._target, row, image, strict=True)
        ]
        for line, r, i in zip(self._information, row, image, strict=True):
            add, drop = trust * r, fade * i
            line[:] = [a + add * s - drop * j for a, s, j in zip(line, row, image, strict=True)]
        self._settle()

    def _settle(self) -> None:
        found, rows = self._coefficients, list(enumerate(zip(self._information, self._target, strict=True)))
        for _ in range(_SWEEPS):
            moved = False
            for i, (line, target) in rows:
                was, own = found[i], line[i]
                rest = target - sum(map(mul, line, found)) + own * was
                found[i] = now = rest / (own if own > _OWN_MIN else _OWN_MIN) if rest > 0 else 0.0
                if not moved:
                    still = _STILL * now
                    moved = now - was > still or was - now > still
            if not moved:
                break
        self._law = [known * unit * self._unit for known, unit in zip(found, self._units, strict=True)]


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
"""Kinds that are distinguished; over it those that were learned first are forgotten."""


class Speed(msgspec.Struct, frozen=True, gc=False):
    """One kind of worker, in seconds."""

    fixed_s: float = 0.0
    """A prompt, however short."""
    token_s: float = 0.0
    """One more token of it."""
    pair_s: float = 0.0
    """One more token, for each token of the whole prompt: attention."""
    stream_s: float = 0.0
    """A stream that runs at the same time."""
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
    """The times of one request at its worker. Times are 0 where they are not known."""

    at_ns: int
    """Its end."""
    computed_tokens: int
    """Of its prompt."""
    prompt_tokens: int
    backlog_tokens: int = 0
    """Prompt tokens of others that were sent there before it and not computed yet."""
    streams: int = 0
    """Running when it came."""
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
        if ran.service_ns:
            self._num_ended += 1
            service_s = ran.service_ns / NS_PER_S
            if self._num_ended > 1:
                service_s = min(service_s, _SERVICE_MAX * self._service_s)
            assert service_s > 0, service_s
            self._service_s += max(_SERVICE_PACE, 1 / self._num_ended) * (service_s - self._service_s)
        if not self.learns_at(ran.at_ns):
            return
        self._learned_ns = ran.at_ns
        self._learn_prefill(ran)
        if ran.step_ns:
            self._step.observe((1.0, ran.step_streams), ran.step_ns)
        self.speed = self._read()

    def learns_at(self, at_ns: int) -> bool:
        """Whether times of a request that ended then would be learned from."""
        return self._learned_ns is None or at_ns >= self._learned_ns + _LEARN_EVERY_NS

    def _learn_prefill(self, ran: Ran) -> None:
        if ran.first_ns <= 0 or ran.waited:
            return
        computed = max(1, ran.computed_tokens)
        tokens = computed + ran.backlog_tokens
        terms = (1.0, tokens, computed * ran.prompt_tokens, ran.streams, tokens * ran.streams)
        self._prefill.observe(terms, ran.first_ns)

    def _read(self) -> Speed:
        fixed_ns, token_ns, pair_ns, stream_ns, token_stream_ns = self._prefill.coefficients
        step_ns, step_stream_ns = self._step.coefficients
        return Speed(
            fixed_s=fixed_ns / NS_PER_S,
            token_s=token_ns / NS_PER_S,
            pair_s=pair_ns / NS_PER_S,
            stream_s=stream_ns / NS_PER_S,
            token_stream_s=token_stream_ns / NS_PER_S,
            step_s=step_ns / NS_PER_S,
            step_stream_s=step_stream_ns / NS_PER_S,
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

    def learns_at(self, kind: str, at_ns: int) -> bool:
        """Whether it would learn of a request that has begun then, whose `service_ns` is not known."""
        found = self._kinds.get(kind)
        return found is None or found.learns_at(at_ns)

    def _enter(self, kind: str) -> _Kind:
        if len(self._kinds) >= _KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        found = self._kinds[kind] = _Kind(self._config)
        assert len(self._kinds) <= _KINDS_MAX, "the bound of kinds holds"
        return found
