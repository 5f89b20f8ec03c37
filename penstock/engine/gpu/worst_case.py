"""The step that takes the most memory: run at start-up, so that none after it has to ask for more."""

from penstock.engine.gpu.step import StepLimits
from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=1000,
    min_p=0.01,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_token_ids=(1,),
    logprobs=20,
)


def largest_step(limits: StepLimits, num_blocks: int) -> StepPlan:
    """As many rows as may run, all of which draw with every parameter there is, and as many tokens as fit the rest.

    Takes rows and blocks from 0 on; nothing may be live in them.
    """
    count = min(limits.max_running, limits.step_tokens, num_blocks)
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
        new_rows.append(NewRow(RequestId(f"largest-{row}"), row, (0,) * length, length, _EVERYTHING))
        work.append(RowWork(row, 0, length, samples=True, new_blocks=blocks))
    return StepPlan(0, tuple(new_rows), tuple(work))


def blocks_of(plan: StepPlan) -> int:
    """Blocks that a plan of new rows takes."""
    return sum(len(work.new_blocks) for work in plan.work)
