"""Faults of a worker's machine: what the driver's lines mean, who sees them, and that streams move."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Recorder
from fleets import fleet_of
from scripted_worker import bench

from penstock.backends.base import GenerateRequest, Phase
from penstock.backends.engine.backend import EngineBackend
from penstock.cli.wiring.wire import worker_at
from penstock.clock import ManualClock
from penstock.config.engine_settings import EngineSettings
from penstock.config.machine import CgroupMemory
from penstock.engine.machine_watch import LOOK_S, REMEDIES, FaultWatch, KernelLog, Remedy, parse_xid
from penstock.errors import StreamBroken
from penstock.protocol.peers import WorkerAt
from penstock.protocol.worker import FaultCount
from penstock.types import RequestId, SamplingParams

XID = "4,1,2,-;NVRM: Xid (PCI:{}): {}, pid=7, name=python, some words\n"
OURS, OTHER = "0000:3b:00", "0000:af:00"
PATIENCE_S = 30.0


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(79, Remedy.END), (48, Remedy.END), (95, Remedy.END), (145, Remedy.END), (13, Remedy.RESTART),
     (94, Remedy.RESTART), (63, Remedy.NOTE), (45, Remedy.NOTE), (999, Remedy.END)],
)  # fmt: skip
def test_each_class_of_xid_has_its_remedy(code, remedy):
    found = parse_xid(XID.format("0000:3B:00", code))
    assert (found.device, found.code, found.remedy) == (OURS, code, remedy)
    assert "some words" in found.text


def test_the_line_that_names_the_action_is_obeyed_and_others_are_none():
    line = "NVRM: Xid (PCI:0000:3b:00): 154, action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    assert parse_xid(line).remedy is Remedy.END
    assert parse_xid(line.rpartition(" to ")[0] + " to 0x0 (None)").remedy is Remedy.NOTE
    assert parse_xid("usb 1-1: new high-speed device") is None
    assert len(REMEDIES) > 60


class Machine:
    """A kernel's log and a cgroup in files, and what a watch of them tells."""

    def __init__(self, path: Path, device: str = OURS) -> None:
        self.log, self.cgroup, self.reported = path / "kmsg", path / "cgroup", []
        self.cgroup.mkdir()
        self.log.write_text(XID.format(device, 79))
        self.kills(0)
        self.share(os.getpid())
        self.watch = FaultWatch(
            device=device, kernel_log=self.log, memory=CgroupMemory(self.cgroup), on_fault=self.on_fault
        )

    def on_fault(self, kind: str, words: str, remedy: Remedy) -> None:
        self.reported.append((kind, remedy))

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def kills(self, count: int) -> None:
        (self.cgroup / "memory.events").write_text(f"low 0\nhigh 3\nmax 9\noom 1\noom_kill {count}\n")

    def share(self, *pids: int) -> None:
        (self.cgroup / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def look(self) -> list[tuple[str, Remedy]]:
        self.reported.clear()
        self.watch.look()
        return list(self.reported)


def test_the_watch_tells_of_its_own_device_and_of_what_is_new(tmp_path):
    machine = Machine(tmp_path)
    assert machine.look() == [], "what was before it is not about it"
    machine.say(XID.format(OTHER, 79) + "6,9,9,-;other words\n" + XID.format(OURS, 63))
    assert machine.look() == [("xid_noted", Remedy.NOTE)]
    line = XID.format(OURS, 79)
    machine.say(line[:30])
    assert machine.look() == []
    machine.say(line[30:])
    assert machine.look() == [("xid", Remedy.END)]
    assert machine.look() == []
    assert LOOK_S <= 0.5, "with the reaction it is to be over in 2 s"
    machine.watch.close()


def test_a_kill_in_the_workers_own_cgroup_ends_it_and_in_a_shared_one_is_told(tmp_path):
    machine = Machine(tmp_path)
    machine.kills(1)
    assert machine.look() == [("oom_kill", Remedy.RESTART)]
    assert machine.look() == []
    machine.share(os.getpid(), 1)
    machine.kills(3)
    assert machine.look() == [("oom_kill", Remedy.NOTE)]
    (tmp_path / "self").write_text("0::/a/b\n")
    assert CgroupMemory.of_self(tmp_path, tmp_path / "self") is None
    assert CgroupMemory.of_self(tmp_path, tmp_path / "nothing") is None
    (tmp_path / "self").write_text("0::/cgroup\n")
    assert CgroupMemory.of_self(tmp_path, tmp_path / "self").num_kills() == 3
    assert CgroupMemory(tmp_path / "nothing").num_kills() == 0
    assert not CgroupMemory(tmp_path / "nothing").is_own(1)


def test_a_machine_that_shows_nothing_is_not_watched(tmp_path):
    watch = FaultWatch(device="", kernel_log=tmp_path / "none", memory=None, on_fault=lambda *_: None)
    watch.start()
    watch.look()
    assert EngineSettings().kernel_log == "/dev/kmsg"


def counts(backend) -> dict[str, int]:
    return {kind: each.count for kind, each in backend.status.faults.items()}


async def until(check) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():
            await asyncio.sleep(0.005)


def test_a_device_that_is_lost_ends_its_worker_and_its_streams_can_move(tmp_path, monkeypatch):
    log = tmp_path / "kmsg"
    log.touch()
    monkeypatch.setenv("SCRIPTED_PCI", OURS)

    async def play() -> None:
        async with bench(0.05) as made:
            worker = await made.start(kernel_log=str(log))
            await worker.wait_ready()
            backend, sink = worker.backend, Recorder()
            sampling = SamplingParams(max_tokens=400)
            request = GenerateRequest(request_id=RequestId("a"), prompt_token_ids=(33, 34), sampling=sampling)
            backend.generate(request, sink)
            await until(lambda: sink.deltas)
            with log.open("a") as file:
                file.write(XID.format(OTHER, 79))
                file.write(XID.format(OURS, 63))
            await until(lambda: counts(backend) == {"xid_noted": 1})
            assert backend.num_streams == 1, "another device, and what is only noted, end nothing"
            with log.open("a") as file:
                file.write(XID.format(OURS, 79))
            await until(lambda: sink.finish is not None)
            assert isinstance(sink.finish.error, StreamBroken)
            assert len(sink.finish.resume) >= len(sink.deltas)
            await until(lambda: backend.status.phase is Phase.DOWN)
            assert counts(backend) == {"xid_noted": 1, "xid": 1}
            assert "Xid 79" in backend.status.faults["xid"].words
            assert backend.status.restarts == 0, "a device that is lost is not tried again"
            assert any("Xid 79" in note.text for note in backend.status.notes)

    asyncio.run(play())


def test_a_worker_that_the_kernel_killed_is_known_as_such_and_starts_again(tmp_path):
    async def play() -> None:
        async with bench() as made:
            worker = await made.start()
            await worker.wait_ready()
            machine = Machine(tmp_path)
            worker._process._memory = CgroupMemory(machine.cgroup)
            machine.kills(1)
            os.kill(worker.pid, 9)
            await until(lambda: worker.backend.status.restarts == 1)
            assert counts(worker.backend) == {"oom_kill": 1}
            assert "lack of memory" in worker.backend.status.faults["oom_kill"].words
            reported = worker.backend.status.faults
            worker.backend.report(stage="later", note="something else")
            assert "lack of memory" in reported["oom_kill"].words
            assert any("lack of memory" in note.text for note in worker.backend.status.notes)

    asyncio.run(play())


def test_gateway_processes_count_what_only_their_parent_has_seen():
    """With `--processes` it is the parent that sees how a worker's process ended."""
    clock, fault = ManualClock(), FaultCount(2, "killed for lack of memory")
    parent, child = (EngineBackend(byte_tokenizer(), clock) for _ in "ab")
    parent.status.faults |= {"oom_kill": fault, "xid": FaultCount(1, "Xid 13")}
    child.status.faults["xid"] = FaultCount(1, "Xid 13, as the worker told it")
    (worker,) = fleet_of(clock, {"m": parent})
    reported = msgspec.json.decode(msgspec.json.encode(worker_at(worker)), type=WorkerAt)
    changes = list[int]()
    child.on_change = lambda: changes.append(1)
    for _ in range(2):
        child.report_from_parent(stage="", notes=(), restarts=0, is_down=False, faults=reported.faults)
        assert child.status.faults == {
            "oom_kill": fault,
            "xid": FaultCount(1, "Xid 13, as the worker told it"),
        }
    assert len(changes) == 1, "the second time is no news"


def test_a_worker_that_its_supervisor_ended_was_not_killed_for_memory(tmp_path):
    """Whatever else the kernel ended in the cgroup meanwhile."""

    async def play() -> None:
        async with bench() as made:
            worker = await made.start()
            await worker.wait_ready()
            machine = Machine(tmp_path)
            worker._process._memory = CgroupMemory(machine.cgroup)
            machine.kills(1)
            worker._process.kill()
            await until(lambda: worker.backend.status.restarts == 1)
            assert worker.backend.status.faults == {}
            assert not any("lack of memory" in note.text for note in worker.backend.status.notes)
            await worker.wait_ready()  # The next one is judged anew.
            machine.kills(2)
            os.kill(worker.pid, 9)
            await until(lambda: counts(worker.backend) == {"oom_kill": 1})

    asyncio.run(play())


def test_a_log_that_is_rotated_or_cut_is_followed_and_a_directory_is_refused(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text("before\n")
    log = KernelLog(path)
    path.rename(tmp_path / "kern.log.1")
    path.write_text("rotated\n")
    assert log.lines() == ["rotated"]
    path.write_text("cut\n")
    assert log.lines() == ["cut"]
    log.close()
    with pytest.raises(IsADirectoryError):
        KernelLog(tmp_path)
