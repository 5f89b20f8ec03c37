"""Which steps are replayed from captured graphs, and when one is captured.

A step of a few milliseconds is hundreds of kernels, and launching them one by one would take the host longer
than the device needs to run them. A graph is launched at once, but has fixed sizes: steps are padded to the
next *bucket* of (tokens, samples). Padding belongs to an unused row, so it changes no result.

    decode   tokens = samples = 1, 2, 4, 8, 16, 24, ... 64, 80, ... 128, 160, ...: at most a quarter is
             padding beyond 8
    mixed    tokens 16, 32, 64, ... up to `tokens_max`, samples 0, 8, 64, all
    larger   not padded and not captured: launching is hidden behind the computing

Nothing is captured before it is wanted: start-up does not wait for sizes that never come. Until its graph is
there a bucket runs eagerly on the very same buffers. Graphs are captured at the n-th use, or when the engine
is idle, largest first (they share one memory pool, and the largest shapes it).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.gpu.platform import Graph, Platform


@dataclass(slots=True, frozen=True)
class StepKind:
    """All that a captured step depends on: how large it is, and what is part of it."""

    tokens: int
    samples: int
    decode_only: bool
    draws: bool
    """Whether the drawing is part of it: not if logits are to be changed or kept in between."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GraphLimits:
    """Bounds of what is captured."""

    max_running: int
    tokens_max: int
    """Mixed steps of more tokens are not captured."""
    count_max: int
    """Graphs at most; 0: none."""
    memory_bytes_max: int
    """Device memory for all of them."""
    uses_before: int = 2
    """Uses of a bucket that run eagerly before its graph is captured. At least 1: the first sets things up
    lazily."""


class Buckets:
    """The sizes that steps are padded to."""

    def __init__(self, limits: GraphLimits) -> None:
        self.decode = decode_sizes(limits.max_running)
        self._mixed = powers(16, limits.tokens_max)
        self._samples = tuple(
            sorted({0, *(n for n in (8, 64) if n < limits.max_running), limits.max_running})
        )

    def fit(self, step: StepKind) -> StepKind | None:
        """The smallest bucket that holds the step, if any does."""
        if step.decode_only and step.samples == step.tokens:
            size = _at_least(self.decode, step.tokens)
            return None if size is None else StepKind(size, size, decode_only=True, draws=step.draws)
        tokens, samples = _at_least(self._mixed, step.tokens), _at_least(self._samples, step.samples)
        if tokens is None or samples is None:
            return None
        return StepKind(tokens, min(samples, tokens), decode_only=False, draws=step.draws and samples > 0)


class GraphCache:
    """Launches steps, from graphs where there are any."""

    def __init__(self, platform: Platform, limits: GraphLimits, run: Callable[[StepKind], None]) -> None:
        self._platform, self._limits, self._run = platform, limits, run
        self._buckets = Buckets(limits)
        self._graphs: dict[StepKind, Graph] = {}
        self._uses: dict[StepKind, int] = {}
        self._bytes = 0
        self.enabled = limits.count_max > 0
        """Whether steps are padded and replayed; off, each runs as it is."""
        self.replays = 0
        """Steps that were launched from a graph."""

    def __len__(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def launch(self, step: StepKind) -> StepKind:
        """Launch a step; returns what it was padded to."""
        bucket = self._buckets.fit(step) if self.enabled else None
        if bucket is None:
            self._run(step)
            return step
        graph = self._graphs.get(bucket)
        if graph is None:
            used = self._uses[bucket] = self._uses.get(bucket, 0) + 1
            if used > self._limits.uses_before and self._has_room():
                graph = self._capture(bucket)
        if graph is None:
            self._run(bucket)
        else:
            self.replays += 1
            graph.replay()
        return bucket

    def warm(self, step: StepKind) -> None:
        """Run one bucket and capture it, whatever its use; nothing of importance may be in the buffers."""
        bucket = self._buckets.fit(step)
        if bucket is None or bucket in self._graphs or not self._has_room():
            return
        self._run(bucket)
        self._capture(bucket)

    def capture_next(self) -> bool:
        """In idle time: capture the largest bucket that was used and has no graph. False: there is none."""
        missing = [bucket for bucket in self._uses if bucket not in self._graphs]
        if not missing or not self._has_room():
            return False
        self._capture(max(missing, key=lambda bucket: (bucket.tokens, bucket.samples)))
        return True

    def decode_steps(self) -> list[StepKind]:
        """Every decode bucket, largest first."""
        sizes = reversed(self._buckets.decode)
        return [StepKind(size, size, decode_only=True, draws=True) for size in sizes]

    def _has_room(self) -> bool:
        return len(self._graphs) < self._limits.count_max and self._bytes < self._limits.memory_bytes_max

    def _capture(self, bucket: StepKind) -> Graph:
        before = self._platform.reserved_bytes()
        graph = self._graphs[bucket] = self._platform.capture(lambda: self._run(bucket))
        self._bytes += max(self._platform.reserved_bytes() - before, 0)
        return graph


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Row counts of decode buckets: steps of at most a quarter from 8 on, and `largest` itself."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 3)))
    return (*(size for size in sizes if size < largest), largest)


def powers(first: int, last: int) -> tuple[int, ...]:
    """`first`, doubled up to `last`, and `last` itself."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return tuple(sizes) if first < last else (last,)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int | None:
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None
