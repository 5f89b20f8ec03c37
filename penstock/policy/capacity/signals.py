"""The facts by which capacity is decided: one model at one moment.

Nothing here is a processor's use: a worker that decodes one row is as busy as one that decodes thirty. Work
is counted in tokens, of which a generated one counts `OUTPUT_WEIGHT` times: a prompt's tokens are computed
together, an answer's one after the other.
"""

import msgspec

OUTPUT_WEIGHT = 4
"""Prompt tokens that take about as long as one generated token in a full batch."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of a model: workers of one kind, in one place. Only `ready` is capacity."""

    name: str = ""
    """Empty: the model's only pool."""
    ready: int = 0
    pending: int = 0
    """Asked for, and not ready: starting, loading, warming, waking."""
    draining: int = 0
    asleep: int = 0
    slots: int = 0
    """Requests that its ready workers run at once, all together, within the promise per token; 0: unknown."""
    trouble: str = ""
    """Why its launcher cannot start workers now; empty: it can, as far as is known."""


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order: so many workers, whatever the load, until then."""

    workers: int
    until_ns: int
    """Of the wall clock."""
    by: str = ""


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """One model since the last look (`window_s`), and as it is now."""

    now_ns: int
    """Never goes back."""
    wall_ns: int
    window_s: float
    pools: tuple[PoolState, ...] = (PoolState(),)
    arrived: int = 0
    """Requests that came, those that were refused for overload included."""
    answered: int = 0
    shed: int = 0
    """Refused or dropped for overload: a part of `arrived`."""
    work: float = 0.0
    """Of the answered requests."""
    protected_share: float = 0.0
    """Of the work, what is of bands that go before others."""
    due: int = 0
    """Answers to which a time is promised."""
    late: int = 0
    """Of them, those that took longer to the first token, or for each further one."""
    ttft_p95_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p95_s: float = 0.0
    wait_p95_s: float = 0.0
    """Before the prompt was begun."""
    waiting: int = 0
    """Requests in the model's queue."""
    running: int = 0
    """Sequences at its workers."""
    kv_use: float = 0.0
    """Share of the ready workers' KV blocks that requests hold."""
    memory_headroom: float = 1.0
    """Of what a worker's processes may take beside the KV cache that is set aside, what is free on the worker
    with least: above it the kernel ends one."""
    cold_starts_s: tuple[float, ...] = ()
    """The times of workers that got ready since the last look, from being asked for."""
    override: Override | None = None

    @property
    def ready(self) -> int:
        """Workers that take requests."""
        return sum(pool.ready for pool in self.pools)

    @property
    def pending(self) -> int:
        """Workers that were asked for and do not take requests yet."""
        return sum(pool.pending for pool in self.pools)

    @property
    def draining(self) -> int:
        """Workers whose last requests run."""
        return sum(pool.draining for pool in self.pools)

    @property
    def slots(self) -> int:
        """Requests that run at once; 0: unknown."""
        return sum(pool.slots for pool in self.pools)


def work_of(prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> float:
    """Of one request, or of many together."""
    assert 0 <= cached_tokens <= prompt_tokens, (cached_tokens, prompt_tokens)
    return float(prompt_tokens - cached_tokens + OUTPUT_WEIGHT * generated_tokens)
