"""What does the scheduler take for a step in which N rows decode? Milliseconds beside a bare loop over them.

    python -m bench.engine.scheduler_host_time [--rows 64 256] [--rounds 5] [--steps 100] [--json FILE]

`schedule()` and `apply()`, without a model. The budget is 0.4 ms at 64 rows and 0.8 ms at 256. The ratio is
to a bare Python loop over the same rows that does nothing but append one token to each array.
"""

from array import array
from statistics import median

from bench.harness import Spread, command_line, in_turns, ratio, rounds_table, write_result
from penstock import rng
from penstock.clock import NS_PER_MS, SystemClock
from penstock.kv.cache.manager import KVManager, blocks_for
from penstock.kv.hashing import BlockHasher, token_array
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import Sampled, StepResult
from penstock.schedule.queue import FCFSQueue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

CLOCK = SystemClock()
CONTEXT = 1024


def make_scheduler(rows: int, steps: int) -> Scheduler:
    """A scheduler with `rows` requests submitted that will still decode after `steps` steps."""
    num_blocks = rows * (blocks_for(CONTEXT + 2 * steps) + 3)
    hasher = BlockHasher(key=b"bench" * 4, identity="bench bfloat16")
    limits = BatchLimits(step_tokens=8192, max_running=rows, max_model_len=CONTEXT + BLOCK_TOKENS + 4 * steps)
    manager = KVManager.with_prefix_cache(num_blocks, hasher)
    scheduler = Scheduler(limits, manager, CLOCK, FCFSQueue(rows))
    tokens = rng.stream(0, "scheduler bench")
    for index in range(rows):
        # Lengths differ, so that every step has its share of rows that fill a block and need another.
        prompt = token_array(tokens.randrange(32_000) for _ in range(CONTEXT + index % BLOCK_TOKENS))
        sampling = SamplingParams(max_tokens=4 * steps, stop_token_ids=(1, 2))
        scheduler.submit(Request(request_id=RequestId(f"r{index}"), tokens=prompt, sampling=sampling))
    return scheduler


def time_rows(rows: int, steps: int) -> list[int]:
    """Nanoseconds in `schedule` and `apply`, of each of `steps` steps in which every row decodes."""
    scheduler, took = make_scheduler(rows, steps), list[int]()
    while len(took) < steps:
        start = CLOCK.now_ns()
        plan = scheduler.schedule()
        planned_ns = CLOCK.now_ns() - start
        assert plan is not None
        result = StepResult(plan.step, tuple(Sampled(work.row, 7) for work in plan.work if work.samples))
        start = CLOCK.now_ns()
        scheduler.apply(result)
        applied_ns = CLOCK.now_ns() - start
        if len(plan.work) == rows == plan.num_tokens:
            took.append(planned_ns + applied_ns)
    return took


def time_bare(rows: int, steps: int) -> list[int]:
    """The baseline: append one token to each of `rows` arrays."""
    arrays, took = [array("i") for _ in range(rows)], list[int]()
    for _ in range(steps):
        start = CLOCK.now_ns()
        for tokens in arrays:
            tokens.append(7)
        took.append(CLOCK.now_ns() - start)
    return took


def times(rounds: int, rows: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of the bare loop and of a step, a median each round."""
    kinds = {"bare loop": time_bare, "step": time_rows}
    return in_turns(
        rounds,
        {name: lambda each=each: median(each(rows, steps)) / NS_PER_MS for name, each in kinds.items()},
    )


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: a step of 64 rows over appending a token to each of 64 arrays."""
    found = times(rounds, 64, 100)
    return {"64 rows": ratio(found["step"], found["bare loop"])}


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    args = parser.parse_args()
    found = {f"{rows} rows": times(args.rounds, rows, args.steps) for rows in args.rows}
    print(rounds_table("", "ms", found))
    write_result(args.json, {"steps": args.steps, "ms_by_rows": found})


if __name__ == "__main__":
    main()
