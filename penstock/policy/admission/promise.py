"""What a request is promised: when its first token comes, and how fast the others follow.

    promise     by band and tier, as configured: 500 ms to the first token, 50 ms per further one
    on a worker never less than `IDLE_FACTOR` times what the same request takes on an idle one

So the promise to a long prompt grows with its own computation, and a slow machine promises what it was
measured to do: one rule for both. Goodput is requests per second that met both promises.
"""

import msgspec

from penstock.clock import NS_PER_MS
from penstock.config.routing import AdmissionConfig, TtftTarget

IDLE_FACTOR = 2.5
"""No promise is shorter than this many times what the same request takes on an idle worker, as measured: what
a long prompt or a slow machine is promised."""


class Promise(msgspec.Struct, frozen=True, gc=False):
    """In nanoseconds; 0 promises nothing."""

    ttft_ns: int = 0
    """From arrival to the first token."""
    tpot_ns: int = 0
    """Mean time per token after the first."""

    def on(self, factor: float, idle_ttft_ns: int, idle_tpot_ns: int) -> "Promise":
        """What holds for a request that takes so long on an idle worker."""
        return Promise(
            self.ttft_ns and max(self.ttft_ns, round(factor * idle_ttft_ns)),
            self.tpot_ns and max(self.tpot_ns, round(factor * idle_tpot_ns)),
        )

    def is_kept(self, ttft_ns: int, tpot_ns: int) -> bool:
        """Whether an answer with these times was in time. `tpot_ns` is 0 for a single token."""
        in_time = not self.ttft_ns or ttft_ns <= self.ttft_ns
        return in_time and (not self.tpot_ns or tpot_ns <= self.tpot_ns)


class Promises:
    """The promises of a configuration.

    The narrowest target that says a time counts: band and tier, tier, band, all.
    """

    __slots__ = ("_all", "_found", "_targets")

    def __init__(self, config: AdmissionConfig) -> None:
        self._all = TtftTarget(ttft_ms=config.ttft_target_ms, tpot_ms=config.tpot_target_ms)
        self._targets = {(target.band, target.tier): target for target in config.targets}
        self._found: dict[tuple[str, str], Promise] = {}

    def of(self, *, tier: str, band: str) -> Promise:
        """The promise to a request of this tier and band, as configured."""
        keys = [key for key in ((band, tier), ("", tier), (band, "")) if any(key)]
        wider = [target for key in keys if (target := self._targets.get(key)) is not None]
        wider.append(self._all)
        ttft_ms = next(each.ttft_ms for each in wider if each.ttft_ms is not None)
        tpot_ms = next(each.tpot_ms for each in wider if each.tpot_ms is not None)
        return Promise(round(ttft_ms * NS_PER_MS), round(tpot_ms * NS_PER_MS))
