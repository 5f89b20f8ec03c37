"""`engine.batch_delay_ms` on virtual time: the worker's own step loop, a real model, and a clock that moves
only while the loop sleeps or a step runs.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from vector_models import decoder

from penstock.clock import NS_PER_MS, NS_PER_S, ManualClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.mailbox import DrainAsked, Mail, Submitted
from penstock.engine.pooling.core import build_vector_core
from penstock.engine.pooling.load import build_any_runner
from penstock.engine.worker import run_steps
from penstock.protocol.worker import Submit
from penstock.rng import stream
from penstock.types import RequestId, SamplingParams

DELAY_MS, STEP_MS = 20, 7
STEP_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("batches")
    decoder("qwen3", place, "lasttoken")
    return place


@dataclass
class Step:
    """One that computed something: when it began, and the requests whose last text was in it."""

    began_ms: float
    ended: list[int]


class TimedMailbox:
    """Has the mail of a script at its times; sleeping for it takes virtual time."""

    def __init__(self, clock: ManualClock, script: list[tuple[float, list[int]]]) -> None:
        self._clock = clock
        self._left = [(round(at * NS_PER_MS), i, lengths) for i, (at, lengths) in enumerate(script)]

    def take(self, *, wait: bool, sleep_s: float | None = None) -> list[Mail]:
        now_ns = self._clock.now_ns()
        if wait:
            next_ns = self._left[0][0] if self._left else now_ns
            until_ns = next_ns if sleep_s is None else min(next_ns, now_ns + round(sleep_s * NS_PER_S))
            if sleep_s is not None and not self._left:
                until_ns = now_ns + round(sleep_s * NS_PER_S)
            self._clock.advance(max(0, until_ns - now_ns))
        return list(self._arrived())

    def _arrived(self) -> Iterator[Mail]:
        while self._left and self._left[0][0] <= self._clock.now_ns():
            at_ns, i, lengths = self._left.pop(0)
            tokens = array("i", [3 + i % 50] * sum(lengths)).tobytes()
            message = Submit(
                request_id=RequestId(f"r{i}"),
                prompt=tokens,
                sampling=SamplingParams(max_tokens=1),
                inputs=tuple(lengths),
            )
            yield Submitted(0, message, at_ns)
        if not self._left:
            yield DrainAsked()


def steps_of(model: Path, script: list[tuple[float, list[int]]], delay_ms: float = DELAY_MS) -> list[Step]:
    """What the loop does with these requests: each comes at a time in milliseconds and has texts of these
    lengths.
    """
    settings = EngineSettings(
        dtype="float32", kernels="torch", kv_memory_bytes=8 << 20, threads=1, step_tokens=STEP_TOKENS,
        max_running=16, batch_delay_ms=delay_ms, prefix_cache=False,
    )  # fmt: skip
    clock = ManualClock()
    runner = build_any_runner(model, settings, clock, lambda _stage, _done, _total: None)
    steps: list[Step] = []
    compute = runner.run

    def run(plan):
        if plan.work:
            steps.append(Step(clock.now_ns() / NS_PER_MS, []))
            clock.advance(STEP_MS * NS_PER_MS)
        return compute(plan)

    runner.run = run
    core = build_vector_core(runner, settings, b"k" * 32, clock)

    def publish(_step, outputs, _stats) -> None:
        for output in outputs.get(0, ()):
            if output.finish is not None:
                steps[-1].ended.append(int(output.request_id[1:]))

    server = SimpleNamespace(publish=publish)
    feed = SimpleNamespace(flush=lambda: None)
    watch = SimpleNamespace(rests=lambda: None, begins=lambda: None, advanced=lambda: None)
    assert not run_steps(core, TimedMailbox(clock, script), server, feed, watch)
    return steps


def test_the_first_text_waits_for_others_and_no_longer(model: Path) -> None:
    assert steps_of(model, [(5, [4]), (10, [4]), (24.9, [4]), (26, [4])]) == [
        Step(25, [0, 1, 2]),  # 20 ms behind the first.
        Step(46, [3]),  # It came while that step ran, and waits from when it came.
    ]


def test_a_full_step_does_not_wait(model: Path) -> None:
    assert steps_of(model, [(5, [4]), (9, [28])]) == [Step(9, [0, 1])]
    assert steps_of(model, [(5, [STEP_TOKENS])]) == [Step(5, [0])]


def test_without_a_delay_nothing_waits(model: Path) -> None:
    assert steps_of(model, [(5, [4]), (6, [4])], delay_ms=0) == [Step(5, [0]), Step(12, [1])]


@pytest.mark.parametrize("seed", range(6))
def test_no_text_waits_longer_than_the_delay_behind_the_steps_before(model: Path, seed: int) -> None:
    """In any order of arrivals: a step begins when it is full, or when its oldest text has waited for the
    delay, or with the end of the step before, whichever comes first of those that can.
    """
    random = stream(seed, "arrivals")
    script: list[tuple[float, list[int]]] = []
    now_ms = 0.0
    for _ in range(30):
        now_ms += random.choice((0.5, 3, 12, 60))
        script.append((now_ms, [random.randrange(1, 12)]))
    steps = steps_of(model, script)
    assert sorted(i for step in steps for i in step.ended) == list(range(30))
    free_ms = 0.0
    for step in steps:
        oldest_ms = min(script[i][0] for i in step.ended)
        assert step.began_ms <= max(free_ms, oldest_ms + DELAY_MS) + 1e-3
        waits = step.began_ms > max(free_ms, oldest_ms) + 1e-3
        if waits and step.began_ms < oldest_ms + DELAY_MS - 1e-3:
            assert sum(script[i][1][0] for i in step.ended) + 12 > STEP_TOKENS, "it was full"
        free_ms = step.began_ms + STEP_MS
