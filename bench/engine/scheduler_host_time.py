"""Host time of the scheduler per step, while N rows decode: `schedule()` and `apply()`, no model.

    python -m bench.engine.scheduler_host_time [--rows 64 256] [--steps 500] [--context 1024] [--json FILE]

The budget is 0.4 ms at 64 rows and 0.8 ms at 256. Beside each figure stands its ratio to a bare Python
loop over the same rows that does nothing but append one token to each array, so that slow machines can
be told from slow code.
"""

import operator
import statistics
from array import array
from collections.abc import Callable

from bench.harness import Spread, command_line, in_turns, ratio, write_result
from penstock import rng
from penstock.clock import NS_PER_MS, SystemClock
from penstock.kv.cache.manager import KVManager, blocks_for
from penstock.kv.hashing import BlockHasher, token_array
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import Sampled, StepPlan, StepResult
from penstock.schedule.queue import FCFSQueue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

CLOCK = SystemClock()


def make_scheduler(rows: int, context: int, steps: int) -> Scheduler:
    """A scheduler with `rows` requests submitted that will still decode after `steps` steps."""
    num_blocks = rows * (blocks_for(context + 2 * steps) + 3)
    hasher = BlockHasher(key=b"bench" * 4, identity="bench bfloat16")
    limits = BatchLimits(step_tokens=8192, max_running=rows, max_model_len=context + BLOCK_TOKENS + 4 * steps)
    manager = KVManager.with_prefix_cache(num_blocks, hasher)
    scheduler = Scheduler(limits, manager, CLOCK, FCFSQueue(rows))
    tokens = rng.stream(0, "scheduler bench")
    for index in range(rows):
        # Lengths differ, so that every step has its share of rows that fill a block and need another.
        prompt = token_array(tokens.randrange(32_000) for _ in range(context + index % BLOCK_TOKENS))
        sampling = SamplingParams(max_tokens=4 * steps, stop_token_ids=(1, 2))
        scheduler.submit(Request(request_id=RequestId(f"r{index}"), tokens=prompt, sampling=sampling))
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    """A result for the plan: the same token for everyone."""
    return StepResult(plan.step, tuple(Sampled(work.row, 7) for work in plan.work if work.samples))


def time_steps(scheduler: Scheduler, rows: int, steps: int) -> tuple[list[int], list[int]]:
    """Nanoseconds in `schedule` and in `apply`, for each of `steps` steps in which every row decodes."""
    planning: list[int] = []
    applying: list[int] = []
    while len(planning) < steps:
        start = CLOCK.now_ns()
        plan = scheduler.schedule()
        planned = CLOCK.now_ns()
        assert plan is not None
        result = answer(plan)
        before = CLOCK.now_ns()
        scheduler.apply(result)
        after = CLOCK.now_ns()
        if len(plan.work) == rows == plan.num_tokens:
            planning.append(planned - start)
            applying.append(after - before)
    return planning, applying


def time_rows(rows: int, steps: int = 300, context: int = 1024) -> tuple[list[int], list[int]]:
    """`time_steps` of a scheduler of its own."""
    return time_steps(make_scheduler(rows, context, steps), rows, steps)


def bare_loop(rows: int) -> Callable[[], int]:
    """The baseline: append one token to each of `rows` arrays; returns its nanoseconds."""
    arrays = [array("i") for _ in range(rows)]

    def once() -> int:
        start = CLOCK.now_ns()
        for tokens in arrays:
            tokens.append(7)
        return CLOCK.now_ns() - start

    return once


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: a step of 64 rows over appending a token to each of 64 arrays."""

    def step_ns() -> float:
        return statistics.median(map(operator.add, *time_rows(64, 100)))

    def bare_ns() -> float:
        once = bare_loop(64)
        return statistics.median(once() for _ in range(100))

    found = in_turns(rounds, {"step": step_ns, "bare": bare_ns})
    return {"64 rows": ratio(found["step"], found["bare"])}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    print(
        f"{'rows':>5} {'schedule ms':>12} {'apply ms':>9} {'sum p50':>8} {'p10':>6} {'p90':>6} "
        f"{'x bare loop':>12}"
    )
    found: list[dict[str, float]] = []
    for rows in args.rows:
        planning, applying = time_rows(rows, args.steps, args.context)
        once = bare_loop(rows)
        bare = statistics.median(once() for _ in range(args.steps))
        sums = [a + b for a, b in zip(planning, applying, strict=True)]
        deciles = statistics.quantiles(sums, n=10)
        figures = [
            statistics.median(planning),
            statistics.median(applying),
            statistics.median(sums),
            deciles[0],
            deciles[8],
        ]
        ms = [value / NS_PER_MS for value in figures]
        names = ("schedule_ms", "apply_ms", "sum_ms_p50", "sum_ms_p10", "sum_ms_p90")
        found.append(dict(zip(names, ms, strict=True)) | {"rows": rows, "times_bare_loop": figures[2] / bare})
        print(
            f"{rows:>5} {ms[0]:>12.3f} {ms[1]:>9.3f} {ms[2]:>8.3f} {ms[3]:>6.3f} {ms[4]:>6.3f} "
            f"{figures[2] / bare:>12.0f}"
        )
    write_result(args.json, {"steps": args.steps, "context": args.context, "by_rows": found})


if __name__ == "__main__":
    main()
