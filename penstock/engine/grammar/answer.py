"""One answer and its grammar: where it stands, and which tokens follow without a choice.

The state is a function of the answer's tokens alone: after a preemption, or on another worker, it is made
again from them. So what is forced never depends on how the tokens were cut into steps.

    OPENING ── the reasoning's mark ──> THINKING ── its closing mark, the model's or ours ──> below
       └────── anything else ─────────────────────────────────────────────────────────────> below

    below:  BOUND                        a grammar: the answer ends where it does
            WRITING <── mark / end ──> BOUND     a grammar for each call within text
            WRITING                      no grammar: only the reasoning was bounded
"""

import enum
from collections.abc import Iterable

from llguidance import LLMatcher

from penstock.engine.grammar.compiler import CompiledGrammar

CALL_MARK_BYTES_MAX = 256
"""How long what begins a call may be."""
_NO_MATCH = "the answer does not match its grammar"


class Stage(enum.Enum):
    """The tokens that may come next."""

    OPENING = "opening"  # The reasoning, or what stands without one.
    THINKING = "thinking"  # Any token; the closing mark is looked for.
    WRITING = "writing"  # Any token; the mark of a call is looked for, if there is a grammar for calls.
    BOUND = "bound"  # Tokens that the grammar allows.


class GrammarAnswer:
    """The grammar's state behind the tokens that were taken so far."""

    __slots__ = (
        "_is_beginning", "_is_let_be", "_is_stopped", "_matcher", "_num_thought", "_stage", "_tail", "error",
        "forced", "grammar", "is_bound", "only_ends",
    )  # fmt: skip

    def __init__(self, grammar: CompiledGrammar, token_ids: Iterable[int]) -> None:
        """`token_ids`: the answer so far, where it continues."""
        self.grammar = grammar
        self._matcher = grammar.first.deep_copy()
        self._is_stopped = self._matcher.is_stopped()
        """Asked once for each change: every call to the library counts, once per row and step."""
        self.forced: list[int] = []
        """Tokens that must come next. The matcher is behind them already."""
        self.only_ends = False
        """Nothing but the end may come next; set with the mask."""
        self.error: str | None = None
        """The error that ended the answer."""
        self.is_bound = False
        """The next token is a choice among those that the grammar allows: nearly always so, and then a token
        costs three calls of the library and none of ours.
        """
        self._is_let_be = False
        """An optional grammar could not be followed: anything goes."""
        self._num_thought = 0
        self._is_beginning = True
        """`_tail` begins where the answer does, behind the reasoning."""
        self._tail = b""
        self._stage = Stage.OPENING
        if not grammar.opening:
            if grammar.marker:
                self._think()
            else:
                self._begin()
        self._settle()
        for token_id in token_ids:
            self.take(token_id)

    @property
    def matcher(self) -> LLMatcher:
        """For masks."""
        return self._matcher

    @property
    def wants_mask(self) -> bool:
        """Whether there is a choice that the grammar bounds."""
        return self.is_bound or (self.may_open_with is not None and not (self._is_stopped or self.error))

    @property
    def must_go_on(self) -> bool:
        """Whether any token may come but the end."""
        return self._stage is Stage.THINKING and not self.grammar.may_end_before and not self.forced

    @property
    def may_open_with(self) -> int | None:
        """A token that may come beside what the grammar allows: the reasoning begins with it."""
        if self._stage is Stage.OPENING and self.grammar.binds_all:
            return self.grammar.opening_ids[0]
        return None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._is_stopped and self._stage is Stage.BOUND and not self.forced

    def try_take(self, token_id: int) -> bool:
        """Take a token that was drawn without a mask, if the grammar allows it. Only where `is_bound`."""
        matcher = self._matcher
        if not matcher.try_consume_tokens([token_id]):
            return False
        forced = matcher.compute_ff_tokens()
        if forced or matcher.is_stopped():
            self._force(forced)
            self._settle()
        return True

    def take(self, token_id: int) -> None:
        """The next token of the answer is known."""
        self.only_ends = False
        if self.is_bound:
            matcher = self._matcher
            if matcher.consume_token(token_id):
                forced = matcher.compute_ff_tokens()
                if not forced and not matcher.is_stopped():
                    return
                self._force(forced)
            else:
                self._fail(matcher.get_error() or _NO_MATCH)
        elif self.error is not None:
            return
        else:
            self._take_other(token_id)
        self._settle()

    def _take_other(self, token_id: int) -> None:
        """A token that is none of the grammar's choices."""
        if self.forced:
            if self.forced.pop(0) != token_id:
                self._fail(_NO_MATCH)
            self._leave_call()
        elif self._stage is Stage.OPENING:
            self._open(token_id)
        elif self._stage is Stage.BOUND:
            self._consume(token_id)
        elif self._stage is Stage.THINKING:
            self._take_thought(token_id)
        elif self.grammar.call_mark and not self._is_let_be:
            self._write(self.grammar.tokens.tokenizer.token_bytes(token_id))

    def _settle(self) -> None:
        """After every change but that of one choice behind another."""
        self.is_bound = (
            self._stage is Stage.BOUND and not self.forced and self.error is None and not self._is_stopped
        )

    def take_forced(self) -> tuple[int, ...]:
        """Every token that must come next, now known to be part of the answer."""
        if not self.forced:
            return ()
        forced, self.forced = tuple(self.forced), []
        self._leave_call()
        self._settle()
        return forced

    def check(self) -> None:
        """After a mask: whether the matcher can continue."""
        if self._matcher.is_error():
            self._is_stopped = True
            self._fail(self._matcher.get_error().partition("\n")[0])
            self._settle()

    # --- the reasoning ----------------------------------------------------------------------------

    def _open(self, token_id: int) -> None:
        grammar = self.grammar
        if grammar.binds_all:
            if token_id == grammar.opening_ids[0]:
                self._think()
                self.forced = [*grammar.opening_ids[1:], *self.forced]
            else:
                self._stage = Stage.BOUND
                self._consume(token_id)
            return
        self._tail += grammar.tokens.tokenizer.token_bytes(token_id)
        begun = self._tail.lstrip()
        if begun.startswith(grammar.opening):
            self._tail = begun[len(grammar.opening) :]
            self._think()
        elif not grammar.opening.startswith(begun):
            text, self._tail = self._tail, b""
            self._begin(text)

    def _think(self) -> None:
        self._stage = Stage.THINKING
        self._bound_thought()

    def _take_thought(self, token_id: int) -> None:
        """Look for the closing mark."""
        grammar = self.grammar
        self._num_thought += 1
        self._tail += grammar.tokens.tokenizer.token_bytes(token_id)
        at = self._tail.find(grammar.marker)
        if at >= 0:
            rest, self._tail = self._tail[at + len(grammar.marker) :], b""
            self._begin(rest)
            return
        self._tail = self._tail[-len(grammar.marker) :]
        self._bound_thought()

    def _bound_thought(self) -> None:
        grammar = self.grammar
        if grammar.begins_within is not None and self._num_thought >= grammar.begins_within:
            self._tail = b""
            self._begin()
            self.forced = [*grammar.marker_ids, *self.forced]

    # --- behind it --------------------------------------------------------------------------------

    def _begin(self, text: bytes = b"") -> None:
        """The reasoning is over, or there is none; `text` is what its last token has behind it. That counts,
        if the grammar allows it.
        """
        if not self.grammar.binds_all:
            self._stage = Stage.WRITING
            if self.grammar.call_mark:
                self._write(text)
            return
        self._stage = Stage.BOUND
        self._consume_text(text)
        self._force(self._matcher.compute_ff_tokens())

    def _write(self, data: bytes) -> None:
        """Look for the mark of a call."""
        pattern = self.grammar.call_mark
        assert pattern is not None
        self._tail += data
        # The beginning to which a pattern may refer is not to be found in the middle of the answer.
        while (found := pattern.search(self._tail, 0 if self._is_beginning else 1)) is not None:
            begins = found.start("call") if pattern.groups else found.end()
            text, self._tail = self._tail[begins:], self._tail[found.end() - 1 :]
            self._is_beginning = False
            self._matcher = self.grammar.first.deep_copy()
            self._is_stopped = self._matcher.is_stopped()
            if self._consume_text(text):
                self._stage, self._tail = Stage.BOUND, b"\n"
                self._force(self._matcher.compute_ff_tokens())
                return
            # The mark is part of a text: no call begins so.
        if len(self._tail) > CALL_MARK_BYTES_MAX:
            self._tail, self._is_beginning = self._tail[-CALL_MARK_BYTES_MAX:], False

    def _consume_text(self, text: bytes) -> bool:
        """Take text that stands in a token whose beginning was free, if the grammar allows it."""
        if not text:
            return True
        behind = self.grammar.tokens.library.tokenize_bytes(text)
        if self._matcher.validate_tokens(behind) != len(behind):
            return False
        self._matcher.consume_tokens(behind)
        return True

    def _consume(self, token_id: int) -> None:
        if self._matcher.consume_token(token_id):
            self._force(self._matcher.compute_ff_tokens())
        else:
            self._fail(self._matcher.get_error() or _NO_MATCH)

    def _force(self, forced: list[int]) -> None:
        """These must follow."""
        matcher = self._matcher
        if forced:
            matcher.consume_tokens(forced)
            self.forced = forced
        self._is_stopped = matcher.is_stopped()
        if self._is_stopped:  # So it is with an error, too.
            self.check()
            self._leave_call()

    def _fail(self, why: str) -> None:
        if not self.grammar.is_optional:
            self.error = why
            return
        # Another worker may have begun it without a grammar.
        self._stage, self._is_let_be = Stage.WRITING, True
        self.forced, self.only_ends = [], False

    def _leave_call(self) -> None:
        """A call's grammar is complete: text follows."""
        if (
            self._stage is Stage.BOUND
            and self.grammar.call_mark
            and not self.grammar.ends_with_calls
            and not self.forced
            and self._is_stopped
            and not self._matcher.is_error()
        ):
            self._stage = Stage.WRITING
