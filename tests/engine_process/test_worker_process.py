"""Real worker processes, spoken to over their socket."""

import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from raw_worker import (
    COMMAND,
    REAL,
    RawWorker,
    environment,
    is_ignored,
    launch_line,
    raw_worker,
    submit,
    wait_gone,
)
from scripted_runner import CRASH, DIE, HANG, HANG_LOCKED, NUM_BLOCKS, scripted_token
from step_gate import StepGate

from penstock.config.checkpoints import resolve
from penstock.protocol.address import UnixAddress
from penstock.protocol.worker import (
    AbortRequest,
    Drain,
    Loading,
    Ping,
    Pong,
    Ready,
    Stats,
    StepOutput,
    WorkerFailed,
)
from penstock.types import FinishReason, RequestId

LONG = 60_000


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_it_loads_gets_ready_and_answers(tcp: bool) -> None:
    with raw_worker(tcp=tcp) as worker:
        client = worker.connect()
        first = client.receive()
        assert isinstance(first, (Loading, Ready))
        ready = first if isinstance(first, Ready) else client.until_kind(Ready)
        assert isinstance(ready, Ready)
        assert (ready.info.model, ready.info.num_blocks) == ("scripted", NUM_BLOCKS)
        client.send(submit("a", seed=4, max_tokens=20))
        outputs = list(client.outputs("a"))
        assert [t for each in outputs for t in each.token_ids] == [
            scripted_token(4, 3 + i) for i in range(20)
        ]
        assert outputs[-1].finish is not None
        assert outputs[-1].finish.reason is FinishReason.LENGTH
        assert client.idle_stats().generated_tokens == 20


def test_whoever_connects_later_hears_the_state_first() -> None:
    with raw_worker() as worker:
        worker.connect().until_kind(Ready)
        late = worker.connect()
        assert isinstance(late.receive(), Ready)
        assert isinstance(late.receive(), Stats)


def test_a_submission_before_ready_is_refused() -> None:
    with raw_worker(model_path="never-ready") as worker:
        client = worker.connect()
        client.send(submit("a"))
        finish = client.last("a").finish
        assert finish is not None
        assert finish.error_kind == "WorkerUnavailable"


def test_abort_frees_the_blocks() -> None:
    with raw_worker(step_s=0.001) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", tuple(range(20, 200)), max_tokens=LONG))
        next(client.outputs("a"))
        client.send(AbortRequest((RequestId("a"), RequestId("unknown"))))
        finish = client.last("a").finish
        assert finish is not None
        assert finish.reason is FinishReason.ABORT
        late = worker.connect()
        late.until_kind(Ready)
        assert late.idle_stats().blocks_used == 0


@pytest.mark.parametrize(("overlap", "launched"), [("off", 0), ("on", 1)])
def test_the_step_that_runs_when_an_abort_arrives_is_the_last(overlap, launched, tmp_path) -> None:
    """With overlap the one behind it is launched already."""
    gate = StepGate(tmp_path)
    with raw_worker(gate=str(tmp_path), overlap=overlap) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", tuple(range(20, 200)), max_tokens=LONG))
        next(client.outputs("a"))
        gate.close()
        held = gate.held_step()
        client.send(AbortRequest((RequestId("a"),)), Ping())
        client.until_kind(Pong)  # What came before it has been heard, too.
        gate.open()
        assert client.last("a").finish.reason is FinishReason.ABORT
        stats = client.idle_stats()
        assert (stats.step, stats.blocks_used) == (held + launched, 0)


def test_connections_are_apart_and_a_lost_one_takes_its_requests_along() -> None:
    with raw_worker(step_s=0.001) as worker:
        left, right = worker.connect(), worker.connect()
        left.until_kind(Ready)
        right.until_kind(Ready)
        left.send(submit("left", max_tokens=LONG))
        right.send(submit("right", max_tokens=30))
        next(left.outputs("left"))
        left.close()
        received = {output.request_id for output in right.outputs("right")}
        assert received == {"right"}
        assert right.idle_stats().blocks_used == 0


@pytest.mark.parametrize(
    "noise",
    [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc", struct.pack("<I", 0)],
    ids=["absurd length", "no message", "empty"],
)
def test_a_broken_frame_costs_only_its_connection(noise: bytes) -> None:
    with raw_worker(step_s=0.001) as worker:
        good, bad = worker.connect(), worker.connect()
        good.until_kind(Ready)
        good.send(submit("a", max_tokens=50))
        bad.send_bytes(noise)
        bad.wait_closed()
        finish = good.last("a").finish
        assert finish is not None
        assert finish.reason is FinishReason.LENGTH


NAN, INF = float("nan"), float("inf")


def test_parameters_out_of_range_fail_their_request_and_nothing_else() -> None:
    """With the real engine, which would end with the first of these."""
    wrong: list[tuple[str, object]] = [
        *((name, value) for name in ("temperature", "top_p", "min_p") for value in (NAN, INF, -1.0)),
        *(
            (f"{name}_penalty", value)
            for name in ("presence", "frequency", "repetition")
            for value in (NAN, INF, -INF, 1e9)
        ),
        ("repetition_penalty", 0.0), ("top_p", 1.5), ("top_k", -1), ("top_k", 2**31), ("min_tokens", -1),
        ("seed", 2**63), ("max_tokens", 0), ("max_tokens", 2**62), ("logprobs", -1), ("logprobs", 10**9),
        ("prompt_logprobs", 10**9), ("stop_token_ids", (2**40,)), ("stop_token_ids", (-1,)),
        ("logit_bias", ((1, NAN),)), ("logit_bias", ((1, INF),)), ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
    ]  # fmt: skip
    with raw_worker(model_path=str(resolve("penstock-demo-mini")), runner=REAL, threads=1) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        for i, (name, value) in enumerate(wrong):
            client.send(submit(f"wrong{i}", **{"max_tokens": 2, name: value}))
            finish = client.last(f"wrong{i}").finish
            assert finish is not None
            assert (finish.reason, finish.error_kind) == (FinishReason.ERROR, "InvalidRequest"), (name, value)
            assert name in finish.error
        client.send(submit("right", max_tokens=2, temperature=1.0, top_p=0.9, seed=2**63 - 1))
        finish = client.last("right").finish
        assert finish is not None
        assert finish.usage.completion_tokens in (1, 2)
        assert worker.process.poll() is None


def test_submitting_an_id_twice_costs_the_connection() -> None:
    with raw_worker(step_s=0.001) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", max_tokens=LONG), submit("a", max_tokens=LONG))
        client.wait_closed()
        other = worker.connect()
        other.until_kind(Ready)
        assert other.idle_stats().blocks_used == 0


def test_a_gateway_that_does_not_read_is_dropped() -> None:
    with raw_worker(connection_buffer_bytes_max=1000) as worker:
        deaf, good = worker.connect(), worker.connect()
        deaf.until_kind(Ready)
        good.until_kind(Ready)
        deaf.send(*(submit(f"a{i}", max_tokens=LONG, logprobs=5) for i in range(60)))
        stats = good.until(
            lambda each: isinstance(each, Stats) and each.generated_tokens > 0 and not each.running
        )
        assert isinstance(stats, Stats)
        assert stats.blocks_used == 0
        assert stats.generated_tokens < 60 * LONG, "its requests ended with it"
        good.send(submit("b", max_tokens=3))
        assert good.last("b").finish is not None


def test_more_requests_than_the_bound_are_refused_at_once() -> None:
    with raw_worker(step_s=0.01, max_running=1, max_waiting=1) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(*(submit(name, max_tokens=LONG) for name in "abc"))
        finish = client.last("c").finish
        assert finish is not None
        assert finish.error_kind == "Overloaded"


@pytest.mark.parametrize("how", ["signal", "message"])
def test_drain_ends_what_runs_refuses_what_is_new_and_exits(how: str) -> None:
    with raw_worker(step_s=0.001) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", max_tokens=400))
        next(client.outputs("a"))
        if how == "signal":
            worker.process.terminate()
        else:
            client.send(Drain())
        client.send(submit("b", max_tokens=1))
        finishes = {}
        while len(finishes) < 2:
            step = client.until_kind(StepOutput)
            assert isinstance(step, StepOutput)
            finishes |= {output.request_id: output.finish for output in step.outputs if output.finish}
        # The signal may come after the submission that follows it.
        assert finishes["b"].error_kind == "Draining" or how == "signal"
        assert finishes["a"].reason is FinishReason.LENGTH
        client.wait_closed()
        assert worker.exit_code() == 0
        assert isinstance(worker.address, UnixAddress)
        assert not Path(worker.address.path).exists()


def test_no_library_starts_a_thread_before_the_worker_has_blocked_its_signals() -> None:
    """SIGTERM would end the process by way of that thread."""
    code = "import sys, penstock.engine.worker; print({'torch', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_idle_worker_drains_at_once_and_has_said_where_its_start_went() -> None:
    with raw_worker() as worker:
        worker.connect().until_kind(Ready)
        worker.process.terminate()
        assert worker.exit_code() == 0
        line = re.search(r"^ready after \d+\.\d\d s \(.* page faults\): (.*)$", worker.errors(), re.MULTILINE)
        assert line is not None
        phases = re.findall(r"([a-z][a-z ]*) \d+\.\d\d \(\d+\.\d\d\)", line[1])
        assert phases[:1] == ["starting"], "an interpreter takes longer than is left out"


def test_a_crash_in_a_step_is_told_and_ends_the_process() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", (CRASH,)))
        failed = client.until_kind(WorkerFailed)
        assert isinstance(failed, WorkerFailed)
        assert (failed.kind, failed.error) == ("ZeroDivisionError", "the script said so")
        assert worker.exit_code() == 1
        assert "Traceback" in worker.errors()


def test_a_step_that_does_not_end_is_told_and_ends_the_process() -> None:
    with raw_worker(stall_timeout_s=0.5) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", (HANG,)))
        failed = client.until_kind(WorkerFailed)
        assert isinstance(failed, WorkerFailed)
        assert failed.kind == "EngineFault"
        assert "steps have not advanced for" in failed.error
        client.wait_closed()
        assert worker.exit_code() == 1
        assert "scripted_runner.py" in worker.errors()  # Every thread's stack.


def test_a_step_that_hangs_with_the_interpreters_lock_ends_the_process_too() -> None:
    with raw_worker(stall_timeout_s=0.4, overlap="on") as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", (HANG_LOCKED,)))
        client.wait_closed()
        assert worker.exit_code() == 1
        assert "scripted_runner.py" in worker.errors()


def test_overlap_drains_to_the_last_step_in_flight() -> None:
    with raw_worker(step_s=0.001, overlap="on") as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", seed=4, max_tokens=200))
        next(client.outputs("a"))
        client.send(Drain())
        assert client.last("a").finish.reason is FinishReason.LENGTH
        assert worker.exit_code() == 0


def test_a_process_that_dies_closes_its_connections() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", (DIE,)))
        client.wait_closed()
        assert worker.exit_code() == -signal.SIGKILL


def test_a_model_that_cannot_be_served_is_told_apart() -> None:
    with raw_worker(model_path="missing") as worker:
        assert worker.exit_code() == 78
        assert worker.errors().endswith("CheckpointError: missing/config.json: no such file\n")


def test_ctrl_c_is_the_parents_business() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        client.until_kind(Ready)
        assert is_ignored(worker.process.pid, signal.SIGINT)
        worker.process.send_signal(signal.SIGINT)
        client.send(submit("a", max_tokens=3))
        assert client.last("a").finish is not None


def test_an_idle_worker_uses_no_processor_time() -> None:
    with raw_worker() as worker:
        client = worker.connect()
        client.until_kind(Ready)
        client.send(submit("a", max_tokens=3))
        client.last("a")
        client.idle_stats()
        # Every thread sleeps soon. A poller would wake each time while an unrelated process runs.
        switches: list[int] = []
        while not switches or (switches[-1] > 4 and len(switches) < 20):
            before = worker.context_switches()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            switches.append(worker.context_switches() - before)
        assert min(switches) <= 4, switches


def test_a_launcher_that_says_nothing_is_an_error() -> None:
    ended = subprocess.run(
        COMMAND, input=b"", capture_output=True, env=environment(), timeout=20, check=False
    )
    assert ended.returncode == 1
    assert b"the launcher must send one line of JSON" in ended.stderr


@pytest.mark.parametrize("model_path", ["scripted", "never-ready"])
def test_the_end_of_standard_input_ends_the_worker(model_path: str) -> None:
    with raw_worker(model_path=model_path) as worker:
        worker.connect()
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.exit_code()


PARENT = """
import os, subprocess, sys
read, write = os.pipe()
worker = subprocess.Popen(sys.argv[1:], stdin=read, stderr=subprocess.DEVNULL)
os.write(write, sys.stdin.buffer.readline())
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_a_worker_does_not_outlive_a_parent_that_is_killed() -> None:
    """The reading end of its standard input stays open here, so that only the kernel can tell it."""
    with tempfile.TemporaryDirectory() as directory:
        address = UnixAddress(f"{directory}/w.sock")
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        with parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            parent.stdin.write(launch_line(address))
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            worker = RawWorker(parent, address)
            client = worker.connect()
            client.until_kind(Ready)
            os.kill(parent.pid, signal.SIGKILL)
            wait_gone(pid)
            client.close()
