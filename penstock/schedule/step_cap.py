"""How large a step may be after steps that did not fit the memory."""

GROW_AFTER_STEPS = 64
"""So many steps in a row must fit before larger ones are tried again. A failed step is wasted: about 1 % at
worst."""


class StepCap:
    """Halves with every step that failed, and doubles again once memory has been enough for a while.

    What a step needs beyond weights and KV grows with its tokens (activations) and its rows (logits), and a
    step has no more rows than tokens: so one number bounds both.
    """

    __slots__ = ("_fitted", "_limit", "tokens")

    def __init__(self, limit: int) -> None:
        self.tokens = self._limit = limit
        """Tokens of one step, and so rows of the batch, at most."""
        self._fitted = 0

    @property
    def is_lowered(self) -> bool:
        """Whether steps are held smaller than they were meant to be."""
        return self.tokens < self._limit

    def step_failed(self, num_tokens: int) -> bool:
        """A step of `num_tokens` ran out of memory.

        False if it was of a single token: no smaller step exists.
        """
        assert 0 < num_tokens <= self._limit, f"a step of {num_tokens} tokens was never allowed"
        self.tokens, self._fitted = max(1, num_tokens // 2), 0
        return num_tokens > 1

    def step_fitted(self) -> None:
        """A step had the memory it needed."""
        if self.tokens < self._limit:
            self._fitted += 1
            if self._fitted >= GROW_AFTER_STEPS:
                self.tokens, self._fitted = min(2 * self.tokens, self._limit), 0
