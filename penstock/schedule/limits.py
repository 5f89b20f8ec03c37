"""The bounds of a batch, and which requests can never run within them."""

from dataclasses import dataclass

from penstock.config.tree import EngineConfig
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.kv.cache.manager import blocks_for
from penstock.schedule.plan import SCORED_TOKENS_MAX
from penstock.schedule.request import Request
from penstock.types import BLOCK_TOKENS


def resolve_max_running(max_running: int, step_tokens: int) -> int:
    """Requests in the batch at most: every running request needs a token of each step, since no decode row is
    skipped.
    """
    return min(max_running, step_tokens)


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """The bounds of a batch."""

    step_tokens: int
    """Tokens computed in one step at most."""
    max_running: int
    """Requests in the batch at most (`resolve_max_running`)."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    scored_tokens: int = SCORED_TOKENS_MAX
    """Prompt tokens of a step whose log-probabilities are wanted, at most: each is a row of logits."""

    preemptions_max: int = 3
    """Preemptions of a request before it is shielded within its class."""
    kv_quota_fraction: float = 1.0
    """Share of the KV blocks that one tenant may hold."""

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.step_tokens, "a decode row is never skipped"
        assert 0 < self.kv_quota_fraction <= 1, self.kv_quota_fraction

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "BatchLimits":
        """The bounds that a config asks for, with the model length that was settled on."""
        return cls(
            config.step_tokens,
            resolve_max_running(config.max_running, config.step_tokens),
            max_model_len,
            kv_quota_fraction=config.kv_quota_fraction or 1.0,
        )

    def num_tokens_max(self, request: Request) -> int:
        """How many tokens prompt and answer of the request may have together."""
        return min(request.num_prompt + request.sampling.max_tokens, self.max_model_len)

    def check_fits(self, request: Request, num_blocks: int) -> None:
        """Refuse what can never run, before anything is done for it.

        Raises:
            InvalidRequest: an empty prompt, or no token to generate, or no other than was resumed.
            ContextTooLong: it does not fit the model's context, or not even an empty cache of `num_blocks`.
        """
        if not request.num_prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if request.num_prompt >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {request.num_prompt} tokens; with at least one token of answer the model "
                f"takes {self.max_model_len}",
                param="prompt",
            )
        if len(request.tokens) >= self.num_tokens_max(request):
            raise InvalidRequest("what was resumed is a whole answer already", param="resumed")
        num_tokens = self.num_tokens_max(request) - 1  # The last token is drawn but never computed.
        if blocks_for(num_tokens) > num_blocks:
            raise ContextTooLong(
                f"prompt and answer of up to {num_tokens + 1} tokens do not fit the KV cache, which holds "
                f"{num_blocks * BLOCK_TOKENS}",
                param="prompt" if blocks_for(request.num_prompt) > num_blocks else "max_tokens",
            )


# How large a step may be after steps that did not fit the memory.

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
