"""The one contract between deciding and computing: a step's plan goes out, its result comes back.

A request has *known* tokens (its prompt and what was generated) and *computed* tokens (those whose KV
is stored). A step computes `num_tokens` more of a request's known tokens; when that reaches the last
known one, the row also samples the next. Prefill, chunks, decode and prefix hits are all this one rule.

Data that exists once per row and step is a msgspec struct: making a frozen dataclass costs ten times as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.kv.cache.host_tier import BlockCopy, Copied
from penstock.types import FinishReason, RequestId, SamplingParams, TokenLogprob, Usage

SCORED_TOKENS_MAX = 64
"""Prompt tokens whose log-probabilities one step computes at most. Logits of a vocabulary of 150,000 take 600
KB a token: a whole chunk's would be the largest tensor of the engine."""


class NewRow(msgspec.Struct, frozen=True):
    """A request that (re)enters the batch: all that the runner must know of it."""

    request_id: RequestId
    row: int
    """Stable index into the runner's tables while the request runs; below `max_running`."""
    token_ids: Sequence[int]
    """Every known token (after a preemption this includes generated ones). From the scheduler an int32 array
    of its own: at 128K tokens a tuple would cost milliseconds, and the array is a buffer that tables can
    copy."""
    num_prompt_tokens: int
    sampling: SamplingParams
    blocks: tuple[int, ...] = ()
    """Block ids the row starts with, if it enters before its first work: parts of its prefix are still
    loading."""
    grammar: object = None
    """The form of its answer, as `engine/grammar` compiled it for the runner; None: anything."""
    adapter: object = None
    """The addition to the model's weights for it, as `engine/adapters` packed it for the runner; None:
    nothing."""
    num_first: int = 0
    """See `Request.num_first`."""


class RowWork(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step."""

    row: int
    num_computed: int
    """Tokens whose KV is stored when the steps before are over: the position of the first token of this
    chunk.

    The runner knows the tokens by then: it was told them with the row, or drew them itself, maybe in the step
    before.
    """
    num_tokens: int
    """How many tokens to compute now; at least 1."""
    samples: bool
    """Whether the chunk ends at the last known token, so that a next token is drawn."""
    new_blocks: tuple[int, ...] = ()
    """Block ids appended to the row's block table before this step (prefix hits included)."""
    scores: bool = False
    """Whether the log-probability of every prompt token that follows a token of this chunk is wanted."""
    drafts: int = 0
    """Of a row that decodes: at most so many guesses of the tokens that follow may be computed behind its
    one, to be kept as far as they are what is drawn. Its blocks have room for them."""
    match_min: int = 0
    """Where the text itself is what is guessed from: so many of the row's last tokens must have stood before
    at least."""


class StepPlan(msgspec.Struct, frozen=True):
    """The computation of one engine step, as a change against the state that the runner already holds.

    Copies run beside this step and later ones. A plan without `work` has nothing to do but to wait for one:
    it starts its copies and returns when at least one of those under way has ended.
    """

    step: int
    new_rows: tuple[NewRow, ...]
    work: tuple[RowWork, ...]
    """Ordered: rows that decode first, then chunks of prompts."""
    freed_rows: tuple[int, ...] = ()
    """Rows whose request finished or was preempted since the last plan; applied before `new_rows`. A plan
    that was made before that may still have work for them, which is dropped."""
    planned_ns: int = 0
    """When the plan was made, on the engine's clock."""
    copies_out: tuple[BlockCopy, ...] = ()
    """Blocks to copy to host memory from now on. A block may change during its copy: then the copy is not
    used."""
    copies_in: tuple[BlockCopy, ...] = ()
    """Blocks to fill from host memory from now on. No work reads them before their end was reported."""
    reads_states: bool = True
    """Whether a proposer that guesses from states is handed those of this step's tokens. No: for now no draft
    is worth its time, and states must cost none."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, drafts included: never above the step's token budget."""
        return sum(work.num_tokens + work.drafts for work in self.work)


class Forced(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a row's grammar forces behind the token that was drawn."""

    token_ids: tuple[int, ...] = ()
    """Tokens that must follow. They are known without a draw: the next step computes them as one chunk."""
    complete: bool = False
    """Nothing may follow: the answer ends here."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The sampler's draw for one row."""

    row: int
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    """The row's logits were not numbers, or its grammar cannot continue: this request fails, the others
    continue."""
    forced: Forced | None = None
    drafted: int = 0
    """How many drafts were computed for it."""
    follows: "tuple[Sampled, ...]" = ()
    """The draws behind it, where drafts had said the tokens before: one for each draft that was right."""
    vector: bytes = b""
    """Of a request that pools: what it asks for, float32, and no token."""


class Scored(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of the prompt tokens that follow those of one row's chunk: one each, in order."""

    row: int
    logprobs: tuple[TokenLogprob, ...]
    error: str | None = None
    """The row's logits were not numbers: this request fails, the others continue."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Drafting:
    """The work of a model that guesses tokens ahead of a step: sums over its passes (see `StepLoad`)."""

    num_passes: int
    num_tokens: int
    num_sequences: int
    kv_read: int
    chunk_pairs: int
    took_ns: int
    reads: bool = True
    """Whether what was said before is read only when a request is to have drafts, as a model does that is
    asked for nothing else; a head on the target's states reads along."""


class StepResult(msgspec.Struct, frozen=True):
    """The result of a plan.

    One `Sampled` for every work item with `samples`, and one `Scored` for every one with `scores`, in plan
    order.
    """

    step: int
    sampled: tuple[Sampled, ...]
    scored: tuple[Scored, ...] = ()
    copied: tuple[Copied, ...] = ()
    """Copies that ended since the last result, whichever plan started them."""
    drafting: Drafting | None = None
    """The time of guesses, within the step's time; None: next to nothing."""
    out_of_memory: str | None = None
    """Why the step could not be computed, in words. Nothing was sampled or scored then, but the rows, block
    tables and copies are as the plan said: the same work can be planned again, in smaller steps."""


class RequestOutput(msgspec.Struct, gc=False):
    """The output of `Scheduler.apply` about one request after a step."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """New tokens of the answer; a token that stopped it is not among them."""
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the next prompt tokens, from the second on. All of them are sent before the first new token is."""
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    usage: Usage | None = None
    """Set exactly when `finish` is. Its `completion_tokens` counts every token that was drawn, the stop token
    too."""
    vector: bytes = b""
    """The vector with which a request that pools ends."""

    def take(self, later: "RequestOutput") -> None:
        """Tell what came of the request behind this in the same step; neither has log-probabilities."""
        assert self.finish is None, f"{self.request_id} continues behind its end"
        self.token_ids += later.token_ids
        self.finish, self.stop_token_id = later.finish, later.stop_token_id
        self.error, self.usage = later.error, later.usage


class StepOutcome(msgspec.Struct):
    """Everything that a step changed for the outside."""

    outputs: list[RequestOutput] = []
