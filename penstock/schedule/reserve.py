"""How much room admission leaves for the answers of those that run.

Room for every answer's `max_tokens` wastes most of the cache, since few answers get that long; room for none
fills it with requests that are preempted for one another soon after. So a share `rho` of what the running
rows are *expected* to generate is kept free: rho rises with every step in which somebody had to be preempted,
and decays otherwise (after SGLang's adaptive new-token ratio).
"""

from penstock.kv.cache.manager import blocks_for
from penstock.schedule.request import Request
from penstock.types import BLOCK_TOKENS

RISE = 0.25
"""Added to rho by a step that preempted."""
DECAY = 1 - 1 / 256
"""What is left of rho after a step that did not: half of it after 180 steps."""
PRIOR_TOKENS = 128
"""Expected length of an answer before any of its class has ended."""
_MEMORY = 1 / 16
_CLASSES_MAX = 64
"""Priority classes with an estimate of their own; any further class shares one."""


class OutputEstimate:
    """How long answers get, by priority class: a running mean over the last 16 or so."""

    __slots__ = ("_means",)

    def __init__(self) -> None:
        self._means: dict[int | None, float] = {}

    def learn(self, request: Request) -> None:
        """Count an answer that ended, for whatever reason."""
        key = self._key(request.priority)
        mean = self._means.get(key, float(PRIOR_TOKENS))
        self._means[key] = mean + _MEMORY * (request.num_generated - mean)

    def remaining(self, request: Request) -> int:
        """Tokens that the request is expected to generate yet: at most what it may, at least a block of that.

        An answer that has outlived the estimate is expected to go on for another block, again and again.
        """
        may = request.num_tokens_max - len(request.tokens)
        assert may >= 0, f"{request.request_id} has more tokens than it may"
        mean = self._means.get(self._key(request.priority), PRIOR_TOKENS)
        return min(may, max(round(mean) - request.num_generated, BLOCK_TOKENS))

    def _key(self, priority: int) -> int | None:
        return priority if priority in self._means or len(self._means) < _CLASSES_MAX else None


class AdmissionReserve:
    """The share rho, in [0, 1], and what it comes to in blocks."""

    __slots__ = ("estimate", "rho")

    def __init__(self) -> None:
        self.estimate = OutputEstimate()
        self.rho = 0.0
        """Nothing is held back before the first preemption shows that it should be."""

    def step_over(self, *, preempted: bool) -> None:
        """Adapt to a step that was planned."""
        self.rho = min(self.rho + RISE, 1.0) if preempted else self.rho * DECAY
        assert 0.0 <= self.rho <= 1.0, self.rho

    @property
    def level(self) -> int:
        """Rho in sixteenths: changes when a refused request should ask again."""
        return int(16 * self.rho)

    def blocks_owed(self, request: Request) -> int:
        """Blocks to keep for a running request: for its known tokens, and for its share of expected ones.

        At least one more than it has known tokens for: a row that decodes needs that within 16 steps.
        """
        known = blocks_for(len(request.tokens) + request.num_drawing) - len(request.table.blocks)
        expected = self.rho * self.estimate.remaining(request) if self.rho else 0.0
        return known + max(1, round(expected / BLOCK_TOKENS))
