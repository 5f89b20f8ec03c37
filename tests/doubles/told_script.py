"""A scripted worker whose answers end when a test says so, and a clock that can be put forward: for orders
that never depend on speed.
"""

from collections.abc import Iterator

from penstock.backends.base import GenerateRequest
from penstock.clock import NS_PER_S, SystemClock

NEVER_S = 1e6
"""`step_s` of a scripted backend that steps only by its `_step`."""


class ToldScript:
    """A `Script`: each request goes on until its seed is among `ended`.

    `started` has the seeds in the order of their starts.
    """

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.started: list[int] = []

    def __call__(self, request: GenerateRequest) -> Iterator[str]:
        self.started.append(request.sampling.seed)
        return self._words(request.sampling.seed)

    def _words(self, seed: int) -> Iterator[str]:
        while seed not in self.ended:
            yield "w"


class JumpingClock(SystemClock):
    """The machine's clock, put forward by whole seconds when a test says so."""

    __slots__ = ("_ahead_ns",)

    def __init__(self) -> None:
        self._ahead_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self._ahead_ns

    def jump(self, seconds: int) -> None:
        """So much time has passed for whoever asks from now on."""
        self._ahead_ns += seconds * NS_PER_S
