"""Measures what single steps of our own engine cost, for the simulator: `penstock bench --fit`.

The engine runs in this process, without sockets, one step at a time. Batches of all sizes, with contexts of
all lengths, are run one after the other; of every step it is kept what it computed and how long it took,
planning and outputs included.
"""

from array import array
from collections.abc import Callable, Iterator

from penstock import rng
from penstock.bench.report import read_environment
from penstock.clock import Clock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, StepRunner, build_core
from penstock.engine.runner import build_runner
from penstock.planning.step_time import Step, StepsFile
from penstock.protocol.worker import ModelInfo, Submit
from penstock.schedule.plan import StepPlan, StepResult
from penstock.schedule.step_time import StepLoad
from penstock.types import RequestId, SamplingParams

ROWS = (1, 2, 4, 8, 16, 32, 64)
OUTPUT_TOKENS = 24
PROMPT_MIN, PROMPT_MAX = 16, 1024
ROUNDS = 3
_HASH_KEY = b"measuring steps " * 2

Progress = Callable[[str, int, int], None]


class _Watching:
    """A runner that remembers what its last step computed.

    It offers `run` alone, so that steps do not overlap.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.load = StepLoad()

    @property
    def info(self) -> ModelInfo:
        """See `StepRunner`."""
        return self._runner.info

    def warm_up(self) -> None:
        """See `StepRunner`."""
        self._runner.warm_up()

    def run(self, plan: StepPlan) -> StepResult:
        """See `StepRunner`."""
        self.load = StepLoad.of(plan.work)
        return self._runner.run(plan)


def measure_steps(
    model_path: str, engine: EngineSettings, clock: Clock, *, seed: int, progress: Progress
) -> StepsFile:
    """Load the model, run batches, and hand out every step.

    Raises:
        OperatorError: the model cannot be served here.
    """
    runner = _Watching(build_runner(model_path, engine, clock, progress))
    runner.warm_up()
    core = build_core(runner, engine, _HASH_KEY, clock)
    draw, steps = rng.stream(seed, "bench/fit"), list[Step]()
    plans = [(round_, rows) for round_ in range(ROUNDS) for rows in ROWS if rows <= engine.max_running]
    for done, (_, rows) in enumerate(plans):
        progress(f"{rows} at once", done, len(plans))
        for number, prompt in enumerate(_prompts(core.info, draw, rows)):
            # Without stop tokens an answer ends by its length alone.
            sampling = SamplingParams(
                max_tokens=OUTPUT_TOKENS + draw.randrange(OUTPUT_TOKENS), temperature=0.0
            )
            submit = Submit(request_id=RequestId(f"{done}-{number}"), prompt=prompt, sampling=sampling)
            core.submit(0, submit, clock.now_ns())
        steps += _run(core, runner, clock)
    machine = read_environment()
    name = f"{core.info.model}, {core.info.dtype}, {core.info.quantization}, {machine.cpu}"
    return StepsFile(name=name, steps=steps, num_blocks=core.info.num_blocks)


def _prompts(info: ModelInfo, draw: rng.Stream, rows: int) -> Iterator[bytes]:
    """Different from the first token on: a prefix hit would hide what a prompt costs."""
    longest = min(
        PROMPT_MAX, info.max_model_len - 2 * OUTPUT_TOKENS, info.num_blocks * info.block_tokens // rows
    )
    for _ in range(rows):
        # Short ones are as frequent as long ones.
        length = min(longest, round(PROMPT_MIN * (PROMPT_MAX / PROMPT_MIN) ** draw.random()))
        yield array("i", (draw.randrange(info.vocab_size) for _ in range(max(1, length)))).tobytes()


def _run(core: EngineCore, runner: _Watching, clock: Clock) -> list[Step]:
    found: list[Step] = []
    while core.has_work:
        runner.load = StepLoad()
        began_ns = clock.now_ns()
        core.step()
        load, step_ns = runner.load, clock.now_ns() - began_ns
        if load.num_tokens and step_ns > 0:
            found.append((load.num_tokens, load.num_sequences, load.kv_read, load.chunk_pairs, step_ns))
    return found
