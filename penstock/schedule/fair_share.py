"""The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

The engine's queue (`schedule/queue.py`) and the gateway's (`policy/queueing/band.py`) share this file,
so that both count the same service: 1 for a prompt token that is computed, 0.1 for one that a prefix cache
holds, 2 for a token that is generated, over the tenant's weight. The tenant with the smallest counter goes
first. A tenant that comes back is lifted to the smallest counter of those that wait, so idleness earns no
credit.
"""

PROMPT_COST, CACHED_COST, OUTPUT_COST = 10, 1, 20
"""Per token, in tenths of a computed prompt token."""
UNIT = 1000
"""Counters are integers, in so many parts of a tenth: nothing drifts, and equal service is equal to the last
unit."""


def cost(prompt: int, cached: int, output: int) -> int:
    """The cost of serving so many tokens, in tenths of a computed prompt token."""
    return PROMPT_COST * prompt + CACHED_COST * cached + OUTPUT_COST * output


def share(tenths: int, weight: float) -> int:
    """The amount that a cost adds to the counter of a tenant with this weight."""
    assert weight > 0, weight
    return round(tenths * UNIT / weight)


class ServiceCounter:
    """The service that one tenant has received."""

    __slots__ = ("served",)

    def __init__(self) -> None:
        self.served = 0

    def lift(self, floor: int) -> None:
        """The tenant comes back: it competes from `floor`, the smallest counter of those that wait."""
        self.served = max(self.served, floor)
