"""How long a step of a simulated engine takes: the contract, and the facts that it is given."""

from typing import NamedTuple, Protocol

from penstock.schedule.plan import RowWork


class StepShape(NamedTuple):
    """What one step computes."""

    decode_rows: int
    """Rows that compute one token each."""
    prefill_rows: int
    prefill_tokens: int
    """Tokens of all chunks of prompts together."""
    kv_tokens: int
    """Tokens whose keys and values are read, once per row: the row's context with this step's tokens."""
    chunk_pairs: int = 0
    """(token, token before it) pairs in the attention of chunks; 0 for rows that decode."""

    @classmethod
    def of(cls, rows: tuple[RowWork, ...]) -> "StepShape":
        """The shape of a plan's work. O(rows)."""
        count, prefill_rows, prefill_tokens, pairs = len(rows), 0, 0, 0
        kv_tokens = count
        for work in rows:
            kv_tokens += work.num_computed
            tokens = work.num_tokens
            if tokens > 1:
                prefill_rows += 1
                prefill_tokens += tokens
                pairs += tokens * work.num_computed + tokens * (tokens + 1) // 2
        kv_tokens += prefill_tokens - prefill_rows
        return cls(count - prefill_rows, prefill_rows, prefill_tokens, kv_tokens, pairs)


class StepTime(Protocol):
    """A model of an engine's speed. Pure: the same shape takes the same time, whatever was asked before."""

    def step_ns(self, shape: StepShape) -> int:
        """Nanoseconds of one step; at least 1."""
        ...


class LinearStepTime:
    """A fixed time per step, and one per decode row, prefill token and KV token read: the simplest engine
    there is.
    """

    __slots__ = ("_fixed_ns", "_kv_ps", "_prefill_ns", "_row_ns")

    def __init__(
        self, *, fixed_ns: int = 6_000_000, row_ns: int = 50_000, prefill_ns: int = 60_000, kv_ps: int = 2_000
    ) -> None:
        """`kv_ps` in picoseconds per KV token; the rest in nanoseconds."""
        self._fixed_ns, self._row_ns, self._prefill_ns, self._kv_ps = fixed_ns, row_ns, prefill_ns, kv_ps

    def step_ns(self, shape: StepShape) -> int:
        """See `StepTime`."""
        decode_rows, _, prefill_tokens, kv_tokens, _ = shape
        return (
            self._fixed_ns
            + self._row_ns * decode_rows
            + self._prefill_ns * prefill_tokens
            + self._kv_ps * kv_tokens // 1000
        )
