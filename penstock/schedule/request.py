"""A request as the scheduler sees it: what is known, what is computed, where it stands and since when."""

import enum
from array import array
from dataclasses import dataclass, field

from penstock.kv.cache.block_pool import NEVER, Epoch
from penstock.kv.cache.manager import BlockTable
from penstock.types import RequestId, SamplingParams, TokenLogprob, Usage


class Status(enum.Enum):
    """Where a request stands. See `TRANSITIONS`."""

    WAITING = "waiting"  # Submitted, never scheduled yet.
    LOADING = (
        "loading"  # Has a row and KV blocks; parts of its prefix are still on their way from host memory.
    )
    RUNNING = "running"  # Has a row; holds KV blocks.
    PREEMPTED = "preempted"  # Was running, gave its blocks up, waits to continue.
    FINISHED = "finished"  # Ended: for whatever reason, and for good.


TRANSITIONS: dict[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.LOADING, Status.RUNNING, Status.FINISHED),
    Status.LOADING: (Status.RUNNING, Status.PREEMPTED, Status.FINISHED),
    Status.RUNNING: (Status.PREEMPTED, Status.FINISHED),
    Status.PREEMPTED: (Status.LOADING, Status.RUNNING, Status.FINISHED),
    Status.FINISHED: (),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence to generate. The caller fills the first part; the scheduler owns the rest."""

    request_id: RequestId
    tokens: "array[int]"
    """Every known token: the prompt, then what was generated (int32; see `token_array`)."""
    sampling: SamplingParams
    num_resumed: int = 0
    """The last so many of `tokens` were generated elsewhere, before it came here: it continues as after a
    preemption."""
    salt: bytes = b""
    """Prefix-cache namespace of the tenant."""
    public_tokens: int = 0
    """Leading tokens of the prompt that are no tenant's secret: whole blocks of them are shared by all
    tenants."""
    priority: int = 0
    """Smaller goes first."""
    fairness_key: str = ""
    """The tenant whose share this work counts against."""
    fairness_weight: float = 1.0
    """How much that share is worth, where the engine's own configuration does not say."""
    grammar: object = None
    """The form of its answer: see `NewRow.grammar`."""
    adapter: object = None
    """The addition to the model's weights for it: see `NewRow.adapter`."""
    pools: bool = False
    """It generates nothing: what is wanted is one vector, made of the hidden states of its prompt."""
    num_first: int = 0
    """Of a pair of texts, leading tokens that are the first; 0: it is none."""
    adapter_name: str = ""
    adapter_digest: str = ""
    """Of the adapter: the KV blocks of each are apart. Empty: of the model itself."""

    num_prompt: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)  # Only ever asked for membership.
    table: BlockTable = field(init=False)
    """Set by `submit`: which blocks hold the KV."""
    num_computed: int = 0
    """Leading tokens whose KV is stored, or will be when the request is no longer loading."""
    num_planned: int = 0
    """Leading tokens whose KV is stored once the plans in flight are over."""
    num_drawing: int = 0
    """Tokens that the plans in flight draw. They are not known yet."""
    num_void: int = 0
    """Further draws in flight that do not count: the grammar has forced tokens into their places."""
    num_speculated: int = 0
    """Drafts of the plan in flight. How many tokens it gives is not known before it is over, so that nothing
    else of the request is planned until then."""
    last_used: Epoch = NEVER
    """The last step that reads or writes its blocks."""
    num_tokens_max: int = 0
    """Prompt and answer together may have this many tokens. Set by `submit`."""
    num_scored: int = 1
    """Leading prompt tokens whose log-probability was told, if that is wanted. The first has none."""
    status: Status = Status.WAITING
    row: int = -1
    """Index into the runner's tables while running, else -1."""
    order: tuple[int, int, int] = (0, 0, 0)
    """(priority, arrival, sequence number): unique, smaller goes first. Set by `submit`."""

    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache when the request first started."""
    num_host_cached: int = 0
    """Of those, what came out of host memory."""
    num_preemptions: int = 0
    takes_row: bool = False
    """It may have the row of a request whose tenant has more (shares.py): it yielded its own, or its
    tenant ran nothing else when it came."""
    num_yields: int = 0
    """How often it gave its row to another tenant's request."""
    num_known_at_row: int = 0
    """Its known tokens when it got its row."""
    num_steps: int = 0
    """Steps that computed something of it."""
    num_found: int = 0
    """Of `num_computed`, tokens that were found cached when the request last entered the batch."""
    num_run_before: int = 0
    """Tokens that were computed before it last entered the batch."""
    num_drafted: int = 0
    """Tokens that were guessed for it and computed,"""
    num_accepted: int = 0
    """and of these, those that are in its answer."""
    draft_tries: float = 0.0
    """Of late, drafts whose place in the answer was drawn,"""
    draft_hits: float = 0.0
    """and those that were right (schedule/speculation.py)."""
    draft_known: int = 0
    """So many of its first tokens a model that guesses had when it last did."""
    draft_idle: int = 0
    """Steps since it had a draft."""
    draft_level: int = 0
    """How much of its text must have stood before, for a guess from that (`MATCHES`)."""
    draft_rest: int = 0
    """Steps in which no guess is looked for, since there was none."""
    num_charged: int = 0
    """Generated tokens that were counted against its tenant's share."""
    kv_block_ns: int = 0
    """KV blocks held x nanoseconds, up to `held_since_ns`."""
    num_held: int = 0
    """KV blocks held since then."""
    held_since_ns: int = 0
    device_ns: int = 0
    """Its share of the time of the steps that computed something of it (`Flight.share`)."""
    arrival_ns: int = 0
    started_ns: int | None = None
    first_token_ns: int | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens) - self.num_resumed
        assert self.num_prompt >= 0 <= self.num_resumed, "more was resumed than there is"
        if self.num_resumed:
            self.num_scored = self.num_prompt  # All scores are sent before the first token is.
            self.num_charged = self.num_resumed
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)

    @property
    def in_batch(self) -> bool:
        """Whether it has a row and holds blocks."""
        return self.status is Status.RUNNING or self.status is Status.LOADING

    @property
    def num_pending(self) -> int:
        """Tokens that are neither computed nor planned: the debt that steps pay off. 1 while decoding.

        A token that a plan in flight draws counts: the runner will know it in time.
        """
        return len(self.tokens) + self.num_drawing - self.num_planned

    @property
    def num_drawn_here(self) -> int:
        """Tokens that were drawn since it got its row, those of the plans in flight included."""
        return len(self.tokens) + self.num_drawing - self.num_known_at_row

    def restart_from(self, num_computed: int) -> None:
        """Start to plan again behind `num_computed` tokens; nothing of it is in flight, or nothing that
        counts.
        """
        assert 0 <= num_computed <= len(self.tokens), f"{num_computed} tokens of {len(self.tokens)}"
        self.num_computed = self.num_planned = num_computed
        self.num_drawing = self.num_void = self.num_speculated = 0

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt are asked for and not all told yet."""
        return self.sampling.prompt_logprobs is not None and self.num_scored < self.num_prompt

    def scores_after(self, num_computed: int) -> bool:
        """Whether logits after so many tokens give the log-probability of a prompt token that is asked
        for.
        """
        return self.sampling.prompt_logprobs is not None and num_computed + 1 < self.num_prompt

    @property
    def num_skippable(self) -> int:
        """Leading tokens that need not be computed if their KV is found: their logits are not wanted."""
        return self.num_scored - 1 if self.wants_scores else len(self.tokens)

    def take_scores(self, first: int, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Count in what a chunk from position `first` on scored; what was not told before (it may resume)."""
        added = logprobs[self.num_scored - 1 - first :]
        self.num_scored += len(added)
        assert self.num_scored <= self.num_prompt, "more was scored than the prompt has"
        return added

    @property
    def num_generated(self) -> int:
        """Tokens that were drawn so far, a stop token included."""
        return len(self.tokens) - self.num_prompt

    def take_draw(self) -> bool:
        """Count a draw that is over; False: it does not count."""
        if self.num_void:
            self.num_void -= 1
            return False
        assert self.num_drawing > 0, f"{self.request_id}: a draw that was not planned"
        self.num_drawing -= 1
        return True

    def void_draws(self) -> None:
        """Tokens are known now where the draws in flight would have put theirs."""
        assert not self.num_void, f"{self.request_id}: more is in flight than may be"
        self.num_void += self.num_drawing
        self.num_drawing = 0

    def move_to(self, status: Status) -> None:
        """Change the status along `TRANSITIONS`; anything else is a bug."""
        assert status in TRANSITIONS[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def count_blocks(self, now_ns: int, num_held: int) -> None:
        """From now on the request holds `num_held` blocks."""
        assert num_held >= 0, num_held
        assert now_ns >= self.held_since_ns, "block-nanoseconds only grow"
        self.kv_block_ns += self.num_held * (now_ns - self.held_since_ns)
        self.num_held, self.held_since_ns = num_held, now_ns

    @property
    def drafts(self) -> tuple[int, int]:
        """How many were accepted, and how many not."""
        return self.num_accepted, self.num_drafted - self.num_accepted

    def usage(self, now_ns: int) -> Usage:
        """The request's usage up to now.

        Queue: submitted to first computed, loading from host memory included. Prefill: from there to the
        first token. Decode: the rest, time spent preempted included.
        """
        started_ns = now_ns if self.started_ns is None else self.started_ns
        first_token_ns = now_ns if self.first_token_ns is None else self.first_token_ns
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=len(self.tokens) - self.num_prompt,
            cached_tokens=self.num_cached,
            host_cached_tokens=self.num_host_cached,
            queue_ns=started_ns - self.arrival_ns,
            prefill_ns=first_token_ns - started_ns,
            decode_ns=now_ns - first_token_ns,
            steps=self.num_steps,
            computed_tokens=self.num_run_before + self.num_computed - self.num_found,
            preemptions=self.num_preemptions + self.num_yields,
            kv_block_ns=self.kv_block_ns + self.num_held * (now_ns - self.held_since_ns),
            device_ns=self.device_ns,
            accepted_drafts=self.num_accepted,
            rejected_drafts=self.num_drafted - self.num_accepted,
        )
