"""One answer and its grammar: where it stands, and which tokens follow without a choice.

The state is a function of the answer's tokens alone: after a preemption, or on another worker, it is made
again from them. So what is forced never depends on how the tokens were cut into steps.

    free text --- marker ---> grammar --- complete ---> the end
    (if the grammar begins after a marker)
"""

from collections.abc import Iterable

from llguidance import LLMatcher

from penstock.engine.grammar.compiler import CompiledGrammar


class GrammarAnswer:
    """The grammar's state behind the tokens that were taken so far."""

    __slots__ = (
        "_matcher", "_num_free", "_tail", "error", "forced", "grammar", "is_free", "only_ends",
    )  # fmt: skip

    def __init__(self, grammar: CompiledGrammar, token_ids: Iterable[int]) -> None:
        """`token_ids`: the answer so far, where it continues."""
        self.grammar = grammar
        self._matcher = grammar.first.deep_copy()
        self.is_free = bool(grammar.marker)
        """Before the marker: any token may come."""
        self.forced: list[int] = []
        """Tokens that must come next. The matcher is behind them already."""
        self.only_ends = False
        """Nothing but the end may come next; set with the mask."""
        self.error: str | None = None
        """Why the answer cannot go on."""
        self._num_free = 0
        self._tail = b""
        if not self.is_free:
            self._force()
        for token_id in token_ids:
            self.take(token_id)

    @property
    def matcher(self) -> LLMatcher:
        """For masks."""
        return self._matcher

    @property
    def wants_mask(self) -> bool:
        """Whether there is a choice that the grammar bounds."""
        return not (self.forced or self.is_free or self.error or self.is_complete)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return not self.forced and not self.is_free and self._matcher.is_stopped()

    def take(self, token_id: int) -> None:
        """The next token of the answer is known."""
        self.only_ends = False
        if self.error is not None:
            return
        if self.forced:
            if self.forced.pop(0) != token_id:
                self.error = "the answer does not match its grammar"
        elif self.is_free:
            self._take_free(token_id)
        elif self._matcher.consume_token(token_id):
            self._force()
        else:
            self.error = self._matcher.get_error() or "the answer does not match its grammar"

    def take_forced(self) -> tuple[int, ...]:
        """Every token that must come next, now known to be part of the answer."""
        forced, self.forced = tuple(self.forced), []
        return forced

    def check(self) -> None:
        """After a mask: whether the matcher can go on."""
        if self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0]

    def _force(self) -> None:
        if not self._matcher.is_stopped() and (forced := self._matcher.compute_ff_tokens()):
            self._matcher.consume_tokens(forced)
            self.forced = forced
        self.check()

    def _take_free(self, token_id: int) -> None:
        """Look for the marker. What its last token has behind it counts, if the grammar allows that."""
        grammar = self.grammar
        self._num_free += 1
        self._tail += grammar.tokens.tokenizer.token_bytes(token_id)
        at = self._tail.find(grammar.marker)
        if at >= 0:
            rest = self._tail[at + len(grammar.marker) :]
            self.is_free, self._tail = False, b""
            behind = grammar.tokens.library.tokenize_bytes(rest) if rest else []
            if behind and self._matcher.validate_tokens(behind) == len(behind):
                self._matcher.consume_tokens(behind)
            self._force()
            return
        self._tail = self._tail[-len(grammar.marker) :]
        if self._num_free == grammar.begins_within:
            self.is_free, self._tail = False, b""
            self._force()
            self.forced = [*grammar.marker_ids, *self.forced]
