"""How long until the first token: a law per model route, fitted to the requests that were served.

    TTFT = wait + prefill
    wait    = tokens ahead * a + streams that must end first * b + what running streams add
    prefill = fixed + uncached tokens * c + attention * d + what running streams add

The gateway sees what stands before a request when it comes (its queue, the workers' queues and streams) and what it
cost when it is over (TTFT; from our own engine also the times and tokens of each part). That is enough for any worker that
speaks HTTP. The law predicts, is held against what came out, and says `unknown` while it is not good.

Samples of a worker that has just started are left out: its first steps compile, capture and fill caches.
Pure and deterministic: gateway and simulator use the same object.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from penstock.config.routing import AdmissionConfig
from penstock.policy.online_law import OnlineLaw

_OWN = ((1.0, 256.0, 2.0**18, 8.0, 8.0 * 256), (0.0, 0.0, 0.0, 0.0, 0.0))
_AHEAD = ((2048.0, 2048.0 * 8, 1e9), (0.0, 0.0, 1.0))
"""Units and prior of the terms. A slot's wait follows from how long streams last, so its coefficient is believed to be 1."""
_MEMORY = 0.98
_SERVICE_PACE = 0.02
_SERVICE_MAX = 10.0
"""One stream counts as this many mean ones at most, so that a single endless one does not set the mean."""
_SCORED = 64
"""Predictions that the calibration looks back on."""
_WORKERS_MAX = 4096
_LEARN_EVERY_NS = 10_000_000
"""One sample in this time is learned from: learning costs more than a short request's relay."""
_FLOOR_NS = 1_000_000
"""Errors are relative, and below a millisecond nobody cares."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a request meets on one model route. Of several workers it is the sum."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt, what is expected to be found (or, afterwards, was found) in the prefix cache."""
    tokens_ahead: int = 0
    """Uncached prompt tokens that are computed before it: queued in the gateway or at workers, or half done."""
    requests_ahead: int = 0
    """Requests that start before it."""
    running: int = 0
    """Streams on ready workers."""
    slots: int = 1
    """Streams that ready workers take at once."""
    has_kv_room: bool = True
    """Whether its KV fits now, beside what runs."""
    replicas: int = 1
    """Ready workers."""
    kinds: tuple[str, ...] = ("",)
    """Kinds of those (hardware and engine), each once: how fast a prompt is computed depends on it."""

    @property
    def num_to_end(self) -> int:
        """Running streams that must end before this request can start."""
        without_slot = self.running + self.requests_ahead + 1 - self.slots
        return max(0, without_slot, 0 if self.has_kv_room else self.requests_ahead + 1)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one request's first token took."""

    load: Load
    """As it was when the request came; `cached_tokens` as it turned out."""
    kind: str
    worker: str
    at_ns: int
    """When the first token came."""
    ttft_ns: int
    prefill_ns: int = 0
    """Of that, the prompt's computation, as our own engine tells in its usage; 0 where nobody tells."""
    predicted_ns: int = 0
    """What was predicted when it came; 0 scores the law as it is now."""


class Prediction(msgspec.Struct, frozen=True):
    """An expected TTFT in its two parts."""

    wait_ns: int
    prefill_ns: int
    is_known: bool
    """Whether the law is good enough to be relied on. If not, the numbers are the best guess there is."""
    margin: float = 1.0
    """Nine of ten requests came within this many times what was predicted."""
    may_promise: bool = False
    """Whether the law is good enough to hold a promise by, which has the margin. So is every law that `is_known`."""

    @property
    def ttft_ns(self) -> int:
        """Both parts: as much too long as too short."""
        return self.wait_ns + self.prefill_ns

    @property
    def promise_ns(self) -> int:
        """What nine of ten such requests keep."""
        return round(self.ttft_ns * self.margin)


class WaitModel:
    """The law of one model route."""

    __slots__ = (
        "_ahead", "_cold_samples", "_error_max", "_error_p90", "_errors", "_learned_ns", "_margin", "_num_ended", "_own",
        "_promise_error_max", "_ratios", "_samples_min", "_seen", "_service_ns",
    )  # fmt: skip

    def __init__(self, config: AdmissionConfig) -> None:
        self._cold_samples, self._samples_min = config.cold_samples, config.samples_min
        self._error_max = config.error_p90_max
        self._promise_error_max = max(config.error_p90_max, config.promise_error_p90_max)
        self._ahead = OnlineLaw(_AHEAD[0], memory=_MEMORY, prior=_AHEAD[1])
        self._own: dict[str, OnlineLaw] = {}
        self._service_ns = 0.0
        self._num_ended = 0
        self._learned_ns: int | None = None
        self._errors: deque[float] = deque(maxlen=_SCORED)
        self._error_p90: float | None = None
        self._ratios: deque[float] = deque(
            maxlen=_SCORED
        )  # What came out, by what was said, of those that waited.
        self._margin = 1.0
        self._seen: dict[str, int] = {}  # Samples by worker since it was last ready.

    @property
    def service_ns(self) -> int:
        """How long a stream holds its slot, on average; 0 before the first has ended."""
        return int(self._service_ns)

    @property
    def error_p90(self) -> float | None:
        """The relative error that nine of ten predictions stay below; None before enough were scored."""
        return self._error_p90

    @property
    def is_known(self) -> bool:
        """Whether predictions can be relied on."""
        return self._error_p90 is not None and self._error_p90 <= self._error_max

    def worker_started(self, worker: str) -> None:
        """A worker has (re)started: its next samples are cold."""
        self._seen[worker] = 0
        if len(self._seen) > _WORKERS_MAX:
            del self._seen[next(iter(self._seen))]

    def predict(self, load: Load) -> Prediction:
        """The expected TTFT. With workers of several kinds the slowest counts: a promise must hold on each.

        Never less for more ahead.
        """
        wait = self._ahead.predict(self._ahead_terms(load))
        laws = [law for kind in load.kinds if (law := self._own.get(kind)) is not None]
        own = max((law.predict(_own_terms(load)) for law in laws), default=0.0)
        seen = len(laws) == len(load.kinds) and all(law.num_observed >= self._samples_min for law in laws)
        may_promise = seen and self._error_p90 is not None and self._error_p90 <= self._promise_error_max
        return Prediction(round(wait), round(own), seen and self.is_known, self._margin, may_promise)

    def added_ns(self, load: Load) -> int:
        """How much later whoever comes next starts because of a request with this load."""
        after = msgspec.structs.replace(
            load,
            tokens_ahead=load.tokens_ahead + max(load.prompt_tokens - load.cached_tokens, 0),
            requests_ahead=load.requests_ahead + 1,
        )
        return self.predict(after).wait_ns - self.predict(load).wait_ns

    def observe(self, sample: Sample) -> float | None:
        """Learn from a request that got its first token. Returns the prediction's relative error, if it was scored."""
        seen = self._seen.get(sample.worker, 0)
        if seen < self._cold_samples:
            if seen == 0:
                self.worker_started(sample.worker)
            self._seen[sample.worker] = seen + 1
            return None
        if sample.ttft_ns <= 0 or not self._is_due(sample.at_ns):
            return None
        own = self._own.setdefault(sample.kind, OnlineLaw(_OWN[0], memory=_MEMORY, prior=_OWN[1]))
        error = self._score(sample, own)
        self._learn(sample, own)
        return error

    def stream_ended(self, worker: str, service_ns: int) -> None:
        """A stream has given its slot back after `service_ns`, however it ended."""
        if service_ns <= 0 or self._seen.get(worker, 0) < self._cold_samples:
            return
        self._num_ended += 1
        counted = min(float(service_ns), _SERVICE_MAX * (self._service_ns or service_ns))
        self._service_ns += max(_SERVICE_PACE, 1 / self._num_ended) * (counted - self._service_ns)

    def _is_due(self, at_ns: int) -> bool:
        if self._learned_ns is not None and at_ns < self._learned_ns + _LEARN_EVERY_NS:
            return False
        self._learned_ns = at_ns
        return True

    def _score(self, sample: Sample, own: OnlineLaw) -> float | None:
        if own.num_observed < self._samples_min:
            return None
        load = sample.load
        said = sample.predicted_ns
        if said <= 0:
            said = self._ahead.predict(self._ahead_terms(load)) + own.predict(_own_terms(load))
        # Twice as long and half as long are errors alike. When the next stream ends is chance: no wait is known better.
        chance_ns = self._service_ns / max(load.slots, 1) if load.num_to_end else 0.0
        error = abs(said - sample.ttft_ns) / max(sample.ttft_ns, said, chance_ns, _FLOOR_NS)
        self._errors.append(error)
        if len(self._errors) >= self._samples_min:
            self._error_p90 = _p90(self._errors)
        if said > 0 and any(self._ahead_terms(load)):
            self._ratios.append(sample.ttft_ns / said)
            if len(self._ratios) >= self._samples_min:
                self._margin = max(1.0, _p90(self._ratios))
        return error

    def _learn(self, sample: Sample, own: OnlineLaw) -> None:
        """Each part from what is known of it; where only the sum is, each from what the other leaves."""
        load, ttft = sample.load, float(sample.ttft_ns)
        own_terms, ahead_terms = _own_terms(load), self._ahead_terms(load)
        wait, prefill = self._ahead.predict(ahead_terms), own.predict(own_terms)
        scale = max(wait + prefill, ttft / 4, _FLOOR_NS)
        if not own.num_observed:
            scale = ttft
        if 0 < sample.prefill_ns <= sample.ttft_ns:
            own.observe(own_terms, float(sample.prefill_ns))
            self._ahead.observe(ahead_terms, ttft - sample.prefill_ns, scale=scale)
        elif not any(ahead_terms):
            own.observe(own_terms, ttft)
        else:
            self._ahead.observe(ahead_terms, max(ttft - prefill, 0.0), scale=scale)
            own.observe(own_terms, max(ttft - wait, 0.0), scale=scale)

    def _ahead_terms(self, load: Load) -> tuple[float, ...]:
        """Tokens ahead of each worker; the same, slowed by streams; nanoseconds until enough streams have ended."""
        tokens = load.tokens_ahead / max(load.replicas, 1)
        slot_ns = load.num_to_end * self._service_ns / max(load.slots, 1)
        return (tokens, tokens * load.running / max(load.replicas, 1), slot_ns)


class WaitModels:
    """The laws of all routes. Bounded by the routes there are."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._models: dict[str, WaitModel] = {}

    def of(self, model: str) -> WaitModel:
        """The law of one route (it is made when first asked for)."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = WaitModel(self._config)
        return found

    def keep(self, models: Iterable[str]) -> None:
        """Forget routes that are not served any more."""
        wanted = set(models)
        for model in [model for model in self._models if model not in wanted]:
            del self._models[model]

    def calibration(self) -> Mapping[str, float | None]:
        """P90 of the relative error by route; None where it is unknown."""
        return {model: law.error_p90 for model, law in self._models.items()}


def _p90(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(9 * len(ordered) - 1) // 10]


def _own_terms(load: Load) -> tuple[float, ...]:
    """What the prompt costs: being there at all, its tokens, their attention, and the streams it shares steps with."""
    tokens = max(load.prompt_tokens - load.cached_tokens, 1)
    streams = load.running / max(load.replicas, 1)
    return (1.0, tokens, tokens * load.prompt_tokens, streams, tokens * streams)
