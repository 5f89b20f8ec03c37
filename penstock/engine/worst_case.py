"""The step that takes the most memory: run at start-up, so that none after it has to ask for more."""

from typing import Protocol

from penstock.kv.hashing import token_array
from penstock.schedule.plan import SCORED_TOKENS_MAX, NewRow, RowWork, StepPlan
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9999,
    min_p=0.01,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_token_ids=(1,),
    logprobs=20,
)


class StepBounds(Protocol):
    """What a step can be at most."""

    @property
    def max_running(self) -> int:
        """Rows of the batch, as `schedule.limits.resolve_max_running` bounds them."""
        ...

    @property
    def step_tokens(self) -> int:
        """Tokens of one step."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        ...


def largest_step(limits: StepBounds, num_blocks: int) -> StepPlan:
    """As many rows as may run, all of which draw with every parameter there is, and as many tokens as fit the
    rest.

    Takes rows and blocks from 0 on; nothing may be live in them.
    """
    count = min(limits.max_running, num_blocks)
    longest = min(limits.max_model_len - 1, (num_blocks // count) * BLOCK_TOKENS)
    lengths = [min(limits.step_tokens // count, longest)] * count
    # The first takes what is left of the tokens, as far as its blocks go.
    left = num_blocks - (count - 1) * -(-lengths[0] // BLOCK_TOKENS)
    rest = limits.step_tokens - sum(lengths[1:])
    lengths[0] = min(rest, limits.max_model_len - 1, left * BLOCK_TOKENS)
    new_rows: list[NewRow] = []
    work: list[RowWork] = []
    block = 0
    for row, length in enumerate(lengths):
        blocks = tuple(range(block, block + -(-length // BLOCK_TOKENS)))
        block += len(blocks)
        new_rows.append(
            NewRow(RequestId(f"largest-{row}"), row, token_array([0] * length), length, _EVERYTHING)
        )
        work.append(RowWork(row, 0, length, samples=True, new_blocks=blocks))
    return StepPlan(0, tuple(new_rows), tuple(work))


def blocks_of(plan: StepPlan) -> int:
    """Blocks that a plan of new rows takes."""
    return sum(len(work.new_blocks) for work in plan.work)


def scoring_step(limits: StepBounds, num_blocks: int) -> StepPlan:
    """One row whose prompt is scored: as many rows of logits as a step ever computes for that.

    Takes the first row and blocks from 0 on, like `largest_step`.
    """
    longest = max(1, limits.max_model_len - 2)  # The prompt is one token longer.
    count = min(SCORED_TOKENS_MAX, limits.step_tokens, longest, num_blocks * BLOCK_TOKENS)
    prompt = token_array([0] * (count + 1))
    new = NewRow(RequestId("scored"), 0, prompt, count + 1, SamplingParams(prompt_logprobs=20))
    work = RowWork(
        0, 0, count, samples=False, new_blocks=tuple(range(-(-count // BLOCK_TOKENS))), scores=True
    )
    return StepPlan(0, (new,), (work,))
