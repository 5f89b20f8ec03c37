"""A runner without a model: it checks every promise that a plan makes, and draws from a formula.

It keeps what the real one keeps (rows, block tables, a KV cache) but a slot of its cache holds a fingerprint
of all tokens up to that position. A row that would read a slot which was not written with its very own
prefix, or in a step that is not over yet, is caught at once: a wrong block table, a prefix hit on the
wrong tokens, a block that was reused too early.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from penstock.kv.cache.host_tier import BlockCopy, Copied
from penstock.kv.cache.manager import blocks_for
from penstock.schedule.plan import NewRow, RowWork, Sampled, Scored, StepPlan, StepResult
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams, TokenLogprob

_MODULUS = (1 << 61) - 1
_EMPTY = -1
_PUBLIC = 12_345_678_901
"""Where fingerprints start in the public region: not where those without a salt do."""


def _fold(fingerprint: int, token: int) -> int:
    return (fingerprint * 1_000_003 + token + 7) % _MODULUS


def draw_token(seed: int, fingerprint: int, vocab_size: int) -> int:
    """The token that follows a prefix: a pure function of the seed and of every token before."""
    return _fold(_fold(fingerprint, seed), 12_345) % vocab_size


def expected_tokens(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    salt: bytes = b"",
    num_public: int = 0,
    vocab_size: int = 97,
) -> tuple[int, ...]:
    """What any correct schedule must generate for a prompt; a stop token is left out."""
    fingerprints = _fingerprints(salt, prompt, num_public)
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        token = draw_token(sampling.seed, fingerprints[-1], vocab_size)
        if token in sampling.stop_token_ids:
            break
        answer.append(token)
        fingerprints.append(_after(fingerprints, token, salt, num_public))
    return tuple(answer)


def expected_scores(prompt: tuple[int, ...], *, salt: bytes = b"", num_public: int = 0) -> list[TokenLogprob]:
    """What every prompt token but the first must be told to score."""
    return [
        TokenLogprob(i + 1, -float(fingerprint))
        for i, fingerprint in enumerate(_fingerprints(salt, prompt, num_public)[:-1])
    ]


def _fingerprints(salt: bytes, tokens: tuple[int, ...], num_public: int = 0) -> list[int]:
    """Of every prefix. The salt goes in where the private part begins."""
    found: list[int] = []
    for token in tokens:
        found.append(_after(found, token, salt, num_public))
    return found


def _after(before: list[int], token: int, salt: bytes, num_public: int) -> int:
    """The fingerprint of one more token."""
    last = before[-1] if before else _PUBLIC
    if len(before) == num_public:
        secret = int.from_bytes(salt, "big") % _MODULUS
        last = _fold(last, secret) if before else secret
    return _fold(last, token)


@dataclass(slots=True)
class _Row:
    request_id: RequestId
    seed: int
    fingerprints: list[int]
    """One for every known token."""
    num_prompt: int
    max_tokens: int
    blocks: list[int] = field(default_factory=list[int])
    num_computed: int | None = None
    """Known from the row's first work on."""


@dataclass(slots=True)
class _Copying:
    """A copy under way. What arrives was read half at its beginning and half at its end."""

    copy: BlockCopy
    out: bool
    began: list[int]
    steps_left: int


@dataclass(slots=True)
class _Launched:
    result: StepResult
    touched: dict[int, list[_Row]] = field(default_factory=dict)
    """Every block that the step reads or writes, and for which rows: until it is collected."""


class CheckingRunner:
    """Runs plans on fingerprints. A broken promise is an AssertionError that says which.

    Steps compute in order as they are launched, but count as unfinished until they are collected: a block
    that another row writes meanwhile was reused too early.
    """

    def __init__(
        self, *, num_blocks: int, max_running: int, vocab_size: int = 97, num_host_slots: int = 0
    ) -> None:
        self.vocab_size = vocab_size
        self.salts: dict[RequestId, bytes] = {}
        """Namespaces of requests that have one: part of their fingerprints."""
        self.public: dict[RequestId, int] = {}
        """Leading tokens in the public region, whole blocks: their fingerprints have no namespace."""
        self.broken: set[RequestId] = set()
        """Requests whose logits are NaN."""
        self.copy_steps = 1
        """A copy ends with the n-th step after the one that began it; waiting ends the oldest at once."""
        self.broken_slots: set[int] = set()
        """Host slots whose copies fail."""
        self._host = [[_EMPTY] * BLOCK_TOKENS for _ in range(num_host_slots)]
        self._copying: list[_Copying] = []
        self.guesses: Random | None = None
        """Says how many drafts of a row there are, and how many of these are right; None: there are none."""
        self.step_tokens_max = 1 << 60
        """Steps with more tokens than this run out of memory."""
        self._launched: deque[_Launched] = deque()
        self._max_running = max_running
        self._rows: dict[int, _Row] = {}
        self._slots = [_EMPTY] * (num_blocks * BLOCK_TOKENS)
        self._written: dict[int, int] = {}  # Slot -> the row that wrote it in this step.

    def run(self, plan: StepPlan) -> StepResult:
        """Launch and collect."""
        self.launch(plan)
        return self.collect()

    def collect(self) -> StepResult:
        """The result of the oldest launched step, which is over now."""
        return self._launched.popleft().result

    def launch(self, plan: StepPlan) -> None:
        """Check the plan, store its fingerprints and draw the next tokens."""
        for row in plan.freed_rows:
            assert self._rows.pop(row, None) is not None, f"row {row} is freed but was not in use"
        for new in plan.new_rows:
            self._enter(new)
        assert len({work.row for work in plan.work}) == len(plan.work), "a row is twice in one step"
        for work in plan.work:
            self._rows[work.row].blocks.extend(work.new_blocks)
        touched = self._touch(plan)
        self._begin_copies(plan)
        if any(each.result.out_of_memory for each in self._launched):
            # What it would read was never computed.
            garbage = StepResult(
                plan.step,
                tuple(Sampled(work.row, 1) for work in plan.work if work.samples),
                tuple(Scored(work.row, ()) for work in plan.work if work.scores),
                copied=self._end_copies(waits=False),
            )
            self._launched.append(_Launched(garbage, touched))
        elif plan.num_tokens > self.step_tokens_max:
            copied = self._end_copies(waits=False)
            failed = StepResult(plan.step, (), copied=copied, out_of_memory="as told")
            self._launched.append(_Launched(failed, touched))
        else:
            self._launched.append(_Launched(self._compute(plan), touched))

    def _touch(self, plan: StepPlan) -> dict[int, list[_Row]]:
        """The blocks that a plan uses. Those that it writes nobody else may be using still."""
        touched: dict[int, list[_Row]] = {}
        for work in plan.work:
            row = self._rows[work.row]
            blocks = row.blocks[: blocks_for(work.num_computed + work.num_tokens + work.drafts)]
            for block in blocks[work.num_computed // BLOCK_TOKENS :]:
                for flight in self._launched:
                    users = flight.touched.get(block, [])
                    assert all(user is row for user in users), f"block {block} is reused while a step uses it"
            for block in blocks:
                touched.setdefault(block, []).append(row)
        return touched

    def _compute(self, plan: StepPlan) -> StepResult:
        self._written.clear()
        for work in plan.work:
            self._write(work)
        sampled = [self._sample(work) for work in plan.work if self._read(work)]
        by_row = {work.row: work for work in plan.work if work.drafts}
        sampled = [self._speculate(by_row[one.row], one) if one.row in by_row else one for one in sampled]
        copied = self._end_copies(waits=not plan.work)
        return StepResult(plan.step, tuple(sampled), self._score(plan), copied=copied)

    def _begin_copies(self, plan: StepPlan) -> None:
        for copying in self._copying:
            copying.steps_left -= 1
        slots = {copying.copy.slot for copying in self._copying}
        for copy, out in [*((c, True) for c in plan.copies_out), *((c, False) for c in plan.copies_in)]:
            assert copy.slot not in slots, f"host slot {copy.slot} has two copies at a time"
            slots.add(copy.slot)
            began = self._device(copy.block) if out else list(self._host[copy.slot])
            self._copying.append(_Copying(copy, out, began, self.copy_steps))
            if not out:
                assert not any(copy.block in each.touched for each in self._launched), (
                    f"block {copy.block} is loaded while a step uses it"
                )
                self._fill(copy.block, [_EMPTY] * BLOCK_TOKENS)

    def _end_copies(self, *, waits: bool) -> tuple[Copied, ...]:
        assert self._copying or not waits, "an empty plan would wait for ever"
        if waits and all(copying.steps_left > 0 for copying in self._copying):
            self._copying[0].steps_left = 0
        ended = [copying for copying in self._copying if copying.steps_left <= 0]
        self._copying = [copying for copying in self._copying if copying.steps_left > 0]
        return tuple(Copied(each.copy.slot, self._end_copy(each)) for each in ended)

    def _end_copy(self, copying: _Copying) -> bool:
        block, slot = copying.copy
        half = BLOCK_TOKENS // 2
        ok = slot not in self.broken_slots
        source = self._device(block) if copying.out else self._host[slot]
        arrived = copying.began[:half] + source[half:] if ok else [_EMPTY] * BLOCK_TOKENS
        if copying.out:
            self._host[slot] = arrived
        else:
            self._fill(block, arrived)
        return ok

    def _device(self, block: int) -> list[int]:
        return self._slots[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]

    def _fill(self, block: int, content: list[int]) -> None:
        self._slots[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = content

    def _enter(self, new: NewRow) -> None:
        assert new.row not in self._rows, f"row {new.row} is given away twice"
        assert 0 <= new.row < self._max_running, f"row {new.row} is out of bounds"
        salt, num_public = self._namespace(new.request_id)
        fingerprints = _fingerprints(salt, new.token_ids, num_public)
        sampling, num_prompt = new.sampling, new.num_prompt_tokens
        self._rows[new.row] = _Row(
            new.request_id, sampling.seed, fingerprints, num_prompt, sampling.max_tokens, list(new.blocks)
        )

    def _namespace(self, request_id: RequestId) -> tuple[bytes, int]:
        return self.salts.get(request_id, b""), self.public.get(request_id, 0)

    def _write(self, work: RowWork) -> None:
        """Store the chunk's fingerprints where the block table says."""
        row = self._rows[work.row]
        assert row.num_computed in (None, work.num_computed), "tokens are skipped or computed twice"
        assert work.num_tokens > 0, "a row without work is planned"
        row.num_computed = end = work.num_computed + work.num_tokens
        assert end <= len(row.fingerprints), "more tokens are planned than are known"
        assert work.samples == (end == len(row.fingerprints)), "samples at the wrong token"
        assert end <= len(row.blocks) * BLOCK_TOKENS, "the block table is too short"
        for position in range(work.num_computed, end):
            slot = self._slot(row, position)
            assert slot not in self._written, f"rows {work.row} and {self._written[slot]} write the same slot"
            self._written[slot] = work.row
            self._slots[slot] = row.fingerprints[position]

    def _read(self, work: RowWork) -> bool:
        """Look at everything that attention would read; whether the row samples."""
        row = self._rows[work.row]
        for position in range(work.num_computed + work.num_tokens):
            slot = self._slot(row, position)
            assert self._slots[slot] == row.fingerprints[position], (
                f"row {work.row} reads foreign KV at {position}"
            )
            writer = self._written.get(slot, work.row)
            assert writer == work.row, f"row {work.row} reads what row {writer} writes in the same step"
        return work.samples

    def _sample(self, work: RowWork) -> Sampled:
        row = self._rows[work.row]
        if row.request_id in self.broken:
            row.fingerprints.append(_after(row.fingerprints, 0, *self._namespace(row.request_id)))
            return Sampled(work.row, 0, error="the logits are not numbers")
        token = draw_token(row.seed, row.fingerprints[-1], self.vocab_size)
        row.fingerprints.append(_after(row.fingerprints, token, *self._namespace(row.request_id)))
        assert len(row.fingerprints) - row.num_prompt <= row.max_tokens, "more is drawn than was asked for"
        return Sampled(work.row, token)

    def _speculate(self, work: RowWork, first: Sampled) -> Sampled:
        """Drafts behind the token that was drawn: all have KV, and those that are right count."""
        row, guesses = self._rows[work.row], self.guesses
        assert work.num_tokens == 1, "only a row that decodes has drafts"
        assert work.samples, "a draft behind what?"
        end = work.num_computed + 1 + work.drafts
        assert end <= len(row.blocks) * BLOCK_TOKENS, "the block table has no room for drafts"
        if guesses is None or first.error is not None:
            return first
        drafted = guesses.randint(0, work.drafts)
        right, follows = guesses.randint(0, drafted), list[Sampled]()
        for i in range(drafted):
            position = work.num_computed + 1 + i
            slot = self._slot(row, position)
            assert slot not in self._written, f"rows {work.row} and {self._written[slot]} write the same slot"
            self._written[slot] = work.row
            self._slots[slot] = row.fingerprints[position] if i < right else _EMPTY
            if i < right:
                row.num_computed = position + 1
                follows.append(self._sample(work))
        return replace(first, drafted=drafted, follows=tuple(follows))

    def _score(self, plan: StepPlan) -> tuple[Scored, ...]:
        """A prompt token's log-probability is minus the fingerprint of what it follows: it cannot be mixed
        up.
        """
        scored: list[Scored] = []
        for work in plan.work:
            if work.scores:
                row = self._rows[work.row]
                ends = range(work.num_computed, min(work.num_computed + work.num_tokens, row.num_prompt - 1))
                found = tuple(TokenLogprob(i + 1, -float(row.fingerprints[i])) for i in ends)
                error = "the logits are not numbers" if row.request_id in self.broken else None
                scored.append(Scored(work.row, () if error else found, error))
        return tuple(scored)

    def _slot(self, row: _Row, position: int) -> int:
        return row.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
