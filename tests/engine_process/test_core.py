from array import array
from collections.abc import Iterator
from itertools import repeat

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runner import EOS, NOT_A_NUMBER, VOCAB_SIZE, ScriptedRunner, scripted_token

from penstock.clock import ManualClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.kv.hashing import PUBLIC
from penstock.protocol.worker import Output, Submit
from penstock.rng import stream
from penstock.schedule.plan import StepPlan, StepResult
from penstock.types import FinishReason, RequestId, SamplingParams

PROMPT = (10, 11, 12)


def core(
    clock: ManualClock | None = None, runner: ScriptedRunner | None = None, **config: object
) -> EngineCore:
    return build_core(runner or ScriptedRunner(), EngineSettings(**config), b"k" * 32, clock or ManualClock())


def submit(request_id: str, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Submit:
    return Submit(
        request_id=RequestId(request_id),
        prompt=array("i", prompt).tobytes(),
        sampling=SamplingParams(**sampling),
    )


def run(engine: EngineCore) -> dict[tuple[int, str], list[Output]]:
    """Step until nothing is left; outputs by (owner, request)."""
    received: dict[tuple[int, str], list[Output]] = {}
    while engine.has_work:
        for owner, outputs in engine.step().items():
            for output in outputs:
                received.setdefault((owner, output.request_id), []).append(output)
    return received


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_each_owner_hears_of_its_own_requests() -> None:
    engine = core()
    engine.submit(1, submit("a", max_tokens=5, seed=1), 0)
    engine.submit(2, submit("b", max_tokens=3, seed=2), 0)
    received = run(engine)
    assert set(received) == {(1, "a"), (2, "b")}
    assert tokens(received[1, "a"]) == [scripted_token(1, 3 + i) for i in range(5)]
    assert tokens(received[2, "b"]) == [scripted_token(2, 3 + i) for i in range(3)]
    for outputs in received.values():
        assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_usage_comes_with_the_first_tokens_and_with_the_end() -> None:
    clock = ManualClock(now_ns=1000)
    engine = core(clock)
    engine.submit(1, submit("a", max_tokens=3), 400)
    first, middle, last = run(engine)[1, "a"]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 1)
    assert first.usage.queue_ns == 600, "the wait in the mailbox counts"
    assert middle.usage is None
    assert last.finish is not None
    assert last.finish.usage.completion_tokens == 3
    assert last.finish.reason is FinishReason.LENGTH


def test_a_prefix_of_the_same_tenant_is_found_again() -> None:
    engine, prompt = core(), tuple(range(32, 132))
    engine.submit(1, submit("a", prompt), 0)
    run(engine)
    engine.submit(1, submit("b", prompt), 0)
    (last,) = (output for output in run(engine)[1, "b"] if output.finish)
    assert last.finish is not None
    assert last.finish.usage.cached_tokens == 96


def test_a_public_prefix_is_found_again_by_another_tenant() -> None:
    engine, prompt = core(), tuple(range(32, 132))
    cached: dict[str, int] = {}
    for name, salt, public_tokens in (("a", b"alice", 40), ("b", b"bob", 40), ("c", b"bob", 0)):
        message = msgspec.structs.replace(submit(name, prompt), cache_salt=salt, public_tokens=public_tokens)
        engine.submit(1, message, 0)
        (last,) = (output for output in run(engine)[1, name] if output.finish)
        assert last.finish is not None
        cached[name] = last.finish.usage.cached_tokens
    assert cached == {"a": 0, "b": 32, "c": 0}


def test_nan_logits_end_one_request() -> None:
    engine = core()
    engine.submit(1, submit("bad", (NOT_A_NUMBER, 5)), 0)
    engine.submit(1, submit("good", max_tokens=4), 0)
    received = run(engine)
    (bad,) = received[1, "bad"]
    assert bad.finish is not None
    assert (bad.finish.reason, bad.finish.error_kind) == (FinishReason.ERROR, "EngineFault")
    assert bad.finish.error == "the logits are not numbers"
    assert len(tokens(received[1, "good"])) == 4
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (submit("x", ()), "InvalidRequest"),
        (submit("x", (VOCAB_SIZE,)), "InvalidRequest"),
        (submit("x", (-1,)), "InvalidRequest"),
        (submit("x", (5,) * 70_000), "ContextTooLong"),
        (Submit(request_id=RequestId("x"), prompt=b"\1\2\3", sampling=SamplingParams()), "InvalidRequest"),
        (msgspec.structs.replace(submit("x"), public_tokens=-1), "InvalidRequest"),
        (msgspec.structs.replace(submit("x"), public_tokens=4), "InvalidRequest"),
        (msgspec.structs.replace(submit("x"), cache_salt=PUBLIC), "InvalidRequest"),
        (msgspec.structs.replace(submit("x"), resumed=b"\1\2\3"), "InvalidRequest"),
        (msgspec.structs.replace(submit("x"), resumed=b"\xff" * 4), "InvalidRequest"),
        (msgspec.structs.replace(submit("x", max_tokens=2), resumed=b"\1\0\0\0" * 2), "InvalidRequest"),
        (msgspec.structs.replace(submit("x", stop_token_ids=(7,)), resumed=b"\7\0\0\0"), "InvalidRequest"),
        (msgspec.structs.replace(submit("x", ()), resumed=b"\7\0\0\0"), "InvalidRequest"),
    ],
    ids=[
        "empty",
        "over the vocabulary",
        "negative",
        "too long",
        "torn",
        "public before it begins",
        "public after its end",
        "reserved",
        "resumed and torn",
        "resumed outside the vocabulary",
        "resumed and whole",
        "resumed and stopped",
        "resumed from nothing",
    ],
)
def test_a_request_that_cannot_be_taken_ends_with_the_reason(message: Submit, kind: str) -> None:
    engine = core()
    engine.submit(1, message, 0)
    (output,) = run(engine)[1, "x"]
    assert output.finish is not None
    assert output.finish.error_kind == kind
    assert output.finish.error


def test_what_is_resumed_goes_on_and_counts_once() -> None:
    whole = tokens(run_one(submit("a", max_tokens=9, seed=3)))
    so_far = array("i", whole[:4]).tobytes()
    received = run_one(msgspec.structs.replace(submit("a", max_tokens=9, seed=3), resumed=so_far))
    assert tokens(received) == whole[4:]
    last = received[-1].finish
    assert last is not None
    assert last.reason is FinishReason.LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 9)


def run_one(message: Submit) -> list[Output]:
    engine = core()
    engine.submit(1, message, 0)
    return run(engine)[1, message.request_id]


def test_a_full_queue_refuses_one_more() -> None:
    engine = core(max_waiting=2)
    for name in "abc":
        engine.submit(1, submit(name), 0)
    received = run(engine)
    kinds = [received[1, name][-1].finish.error_kind for name in "abc"]
    assert kinds == [None, None, "Overloaded"]


def test_kv_memory_is_counted_beside_the_context_that_it_holds() -> None:
    engine = core()
    engine.submit(1, submit("a", tuple(range(32, 99)), max_tokens=3), 0)
    engine.submit(1, submit("b", (40, 41), max_tokens=3), 0)
    run(engine)
    stats, block = engine.stats(), engine.info.block_tokens
    # Three steps: 67 to 69 tokens in whole blocks, and 2 to 4 in one.
    held = -(-67 // block) + -(-68 // block) + -(-69 // block) + 3
    assert stats.kv_held_tokens == held * block
    assert stats.timed_kv_read == 67 + 68 + 69 + 2 + 3 + 4


def test_abort_frees_everything_at_once_and_is_answered() -> None:
    engine = core()
    engine.submit(1, submit("a", tuple(range(32, 99)), max_tokens=1000), 0)
    engine.step()
    engine.step()
    assert engine.stats().blocks_used > 0
    engine.abort(1, (RequestId("a"), RequestId("unknown")))
    assert engine.stats().blocks_used == 0
    (output,) = run(engine)[1, "a"]
    assert output.finish is not None
    assert (output.finish.reason, output.finish.usage.completion_tokens) == (FinishReason.ABORT, 2)


def test_nobody_aborts_another_owners_request() -> None:
    engine = core()
    engine.submit(1, submit("a", max_tokens=3), 0)
    engine.abort(2, (RequestId("a"),))
    assert len(tokens(run(engine)[1, "a"])) == 3


def test_the_same_id_from_another_owner_is_refused_and_harms_nobody() -> None:
    engine = core()
    engine.submit(1, submit("a", max_tokens=3), 0)
    engine.submit(2, submit("a", max_tokens=3), 0)
    received = run(engine)
    assert len(tokens(received[1, "a"])) == 3
    assert received[2, "a"][0].finish.error_kind == "InvalidRequest"


def test_draining_refuses_what_is_new_and_ends_what_runs() -> None:
    engine = core()
    engine.submit(1, submit("a", max_tokens=3), 0)
    engine.drain()
    engine.submit(1, submit("b"), 0)
    received = run(engine)
    assert len(tokens(received[1, "a"])) == 3
    assert received[1, "b"][0].finish.error_kind == "Draining"


def test_stats_tell_compute_from_host_time() -> None:
    class Slow(ScriptedRunner):
        def run(self, plan: StepPlan) -> StepResult:
            clock.advance(1000)
            return super().run(plan)

    clock = ManualClock()
    engine = core(clock, Slow())
    engine.submit(1, submit("a", max_tokens=3), 0)
    run(engine)
    stats = engine.stats()
    assert (stats.step, stats.generated_tokens, stats.prompt_tokens) == (3, 3, 3)
    assert (stats.step_ns, stats.host_ns) == (3 * 1000, 0), "all of a step's time is the runner's here"


def test_eos_is_not_part_of_the_answer() -> None:
    engine = core()
    stop = scripted_token(5, 3 + 2)
    engine.submit(1, submit("a", seed=5, max_tokens=9, stop_token_ids=(stop, EOS)), 0)
    outputs = run(engine)[1, "a"]
    finish = outputs[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, stop)
    assert stop not in tokens(outputs)


# --- overlap, and steps that run out of memory ------------------------------------------------------


def test_with_overlap_the_next_step_is_launched_before_this_one_is_told() -> None:
    runner = ScriptedRunner()
    engine = core(runner=runner, overlap="on")
    stop = scripted_token(5, 3 + 4)
    engine.submit(1, submit("a", seed=5, max_tokens=50, stop_token_ids=(stop,)), 0)
    engine.submit(1, submit("b", seed=1, max_tokens=9), 0)
    received = run(engine)
    answer = [scripted_token(5, 3 + i) for i in range(5)]
    assert tokens(received[1, "a"]) == answer[: answer.index(stop)]
    assert received[1, "a"][-1].finish.usage.completion_tokens == answer.index(stop) + 1
    assert tokens(received[1, "b"]) == [scripted_token(1, 3 + i) for i in range(9)]
    assert engine.stats().blocks_used == 0
    assert not engine.has_work


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=["python", "torch on the CPU", "torch on a GPU"],
)
def test_a_step_out_of_memory_is_done_again_in_smaller_ones(error: Exception, overlap: str) -> None:
    runner = ScriptedRunner()
    runner.raises = lambda plan: error if plan.num_tokens > 20 else None
    engine = core(runner=runner, overlap=overlap)
    for name in "abc":
        engine.submit(1, submit(name, tuple(range(32, 72)), seed=2, max_tokens=6), 0)
    received = run(engine)
    for name in "abc":
        assert tokens(received[1, name]) == [scripted_token(2, 40 + i) for i in range(6)]
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_request_that_never_fits_fails_alone(overlap: str) -> None:
    runner = ScriptedRunner()
    rows: dict[int, str] = {}

    def raises(plan: StepPlan) -> Exception | None:
        rows.update((new.row, new.request_id) for new in plan.new_rows)
        return MemoryError("no room") if any(rows[work.row] == "huge" for work in plan.work) else None

    runner.raises = raises
    engine = core(runner=runner, overlap=overlap)
    engine.submit(1, submit("huge", seed=1, max_tokens=6), 0)
    engine.submit(1, submit("good", seed=2, max_tokens=6), 0)
    received = run(engine)
    finish = received[1, "huge"][-1].finish
    assert (finish.reason, finish.error_kind) == (FinishReason.ERROR, "EngineFault")
    assert "out of memory: no room" in finish.error
    assert tokens(received[1, "good"]) == [scripted_token(2, 3 + i) for i in range(6)]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_any_other_error_of_a_step_is_raised(overlap: str) -> None:
    runner = ScriptedRunner()
    runner.raises = lambda _plan: RuntimeError("shapes do not match")
    engine = core(runner=runner, overlap=overlap)
    engine.submit(1, submit("a"), 0)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(engine)


class SlowRunner(ScriptedRunner):
    """Every step takes as long as is drawn for it."""

    def __init__(self, clock: ManualClock, times_ns: Iterator[int]) -> None:
        super().__init__()
        self._step_clock, self._times_ns = clock, times_ns

    def run(self, plan: StepPlan) -> StepResult:
        self._step_clock.advance(next(self._times_ns))
        return super().run(plan)


def test_requests_share_the_time_by_their_work() -> None:
    clock = ManualClock()
    engine = core(clock, SlowRunner(clock, repeat(1000)))
    engine.submit(1, submit("long", tuple(range(32, 232)), max_tokens=1), 0)
    engine.submit(1, submit("short", max_tokens=1), 0)
    received = run(engine)
    (long,), (short,) = received[1, "long"], received[1, "short"]
    assert long.finish is not None
    assert short.finish is not None
    assert long.finish.usage.device_ns == long.device_ns == 985  # 200 tokens of 203, and what they attend to.
    assert short.finish.usage.device_ns == 14
    assert engine.stats().busy_ns == 1000


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_shares_of_time_come_to_the_time_in_which_there_was_work(data: st.DataObject) -> None:
    clock = ManualClock()
    draw = stream(data.draw(st.integers(0, 99)), "steps")
    times_ns = iter(lambda: draw.randrange(10**8), -1)
    engine = core(clock, SlowRunner(clock, times_ns))
    shares: dict[str, int] = {}
    aborts, steps = False, 0
    for number in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["submit", "submit", "step", "idle", "abort"])):
            case "submit":
                prompt = tuple(range(32, 32 + data.draw(st.integers(1, 80))))
                message = submit(f"r{number}", prompt, max_tokens=data.draw(st.integers(1, 6)))
                engine.submit(1, message, clock.now_ns())
            case "abort":
                aborts = True
                engine.abort(1, tuple(RequestId(f"r{each}") for each in range(number)))
            case "idle":
                clock.advance(10**9)
            case _:
                steps += note(engine, shares)
    while engine.has_work:
        steps += note(engine, shares)
    busy_ns, total = engine.stats().busy_ns, sum(shares.values())
    assert total <= busy_ns <= clock.now_ns()
    if not aborts:
        assert busy_ns - total < 12 * steps + 1, "only rounding is left over"


def note(engine: EngineCore, shares: dict[str, int]) -> int:
    """One step; every request's share as it was last told."""
    for outputs in engine.step().values():
        for output in outputs:
            assert output.device_ns >= shares.get(output.request_id, 0)
            shares[output.request_id] = output.device_ns
    return 1
