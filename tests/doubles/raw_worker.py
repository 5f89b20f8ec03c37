"""A worker process and plain blocking sockets to it: the wire as it is, without launcher or backend."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from free_port import free_port
from step_gate import ENVIRONMENT

from penstock.config.engine_settings import EngineSettings
from penstock.protocol.address import Address, TcpAddress, UnixAddress, WorkerLaunch
from penstock.protocol.worker import (
    FrameDecoder,
    FromWorker,
    Output,
    Stats,
    StepOutput,
    Submit,
    ToWorker,
    decode_from_worker,
    encode,
)
from penstock.types import RequestId, SamplingParams

DOUBLES = str(Path(__file__).parent)
TIMEOUT_S = 60.0
COMMAND = (sys.executable, "-m", "penstock.engine.worker")


class Client:
    """One connection, as a gateway has it."""

    def __init__(self, address: Address, source: str = "") -> None:
        """`source`: the loopback address to come from."""
        unix = isinstance(address, UnixAddress)
        self._socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self._socket.settimeout(TIMEOUT_S)
        try:
            if source:
                self._socket.bind((source, 0))
            self._socket.connect(address.path if unix else (address.host, address.port))
        except OSError:
            self._socket.close()
            raise
        self._decoder = FrameDecoder()
        self._queue: list[FromWorker] = []

    def send(self, *messages: ToWorker) -> None:
        self.send_bytes(b"".join(map(encode, messages)))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> FromWorker | None:
        """The next message; None when the worker has closed the connection."""
        while not self._queue:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._queue += map(decode_from_worker, self._decoder.feed(data))
        return self._queue.pop(0)

    def until(self, wanted: Callable[[FromWorker], bool]) -> FromWorker:
        """Skip to the first message that is `wanted`."""
        while (message := self.receive()) is not None:
            if wanted(message):
                return message
        raise EOFError

    def until_kind(self, kind: type) -> FromWorker:
        return self.until(lambda message: isinstance(message, kind))

    def outputs(self, request_id: str) -> Iterator[Output]:
        """A request's outputs, to its finish."""
        while True:
            step = self.until_kind(StepOutput)
            assert isinstance(step, StepOutput)
            for output in step.outputs:
                if output.request_id == request_id:
                    yield output
                    if output.finish is not None:
                        return

    def last(self, request_id: str) -> Output:
        *_, last = self.outputs(request_id)
        return last

    def idle_stats(self) -> Stats:
        """The first figures that show an engine without work."""
        found = self.until(
            lambda message: isinstance(message, Stats) and not message.running + message.waiting
        )
        assert isinstance(found, Stats)
        return found

    def wait_closed(self) -> None:
        """Read to the end of the connection."""
        while self.receive() is not None:
            pass

    def close(self) -> None:
        self._socket.close()


class RawWorker:
    """A running `penstock.engine.worker`."""

    def __init__(self, process: subprocess.Popen[bytes], address: Address) -> None:
        self.process, self.address = process, address
        self._clients: list[Client] = []

    def connect(self, source: str = "") -> Client:
        """A connection, from `source` if it is given; retried until the worker listens."""
        while True:
            try:
                client = Client(self.address, source)
            except (FileNotFoundError, ConnectionRefusedError):
                assert self.process.poll() is None, "the worker is gone"
                select.select([], [], [], 0.005)
            else:
                self._clients.append(client)
                return client

    def context_switches(self) -> int:
        """Of all threads, wanted or not, so far."""
        total = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            status = (task / "status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
        return total

    def resident_bytes(self) -> int:
        """Its resident memory, as the kernel counts it."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def exit_code(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def errors(self) -> str:
        """All of its standard error; after its exit."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def end(self) -> None:
        for client in self._clients:
            client.close()
        for stream in (self.process.stdin, self.process.stderr):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait()


SCRIPTED = "scripted_runner:build_runner"
REAL = "penstock.engine.runner:build_runner"


def launch_line(
    address: Address,
    *,
    model_path: str = "scripted",
    model_name: str = "scripted",
    runner: str = SCRIPTED,
    key: bytes = b"",
    asleep: bool = False,
    **engine: object,
) -> bytes:
    launch = WorkerLaunch(
        model_path=model_path,
        model_name=model_name,
        address=str(address),
        hash_key=b"secret" * 4,
        key=key,
        engine=EngineSettings(**engine),
        runner=runner,
        asleep=asleep,
    )
    return msgspec.json.encode(launch) + b"\n"


def environment(step_s: float = 0.0, gate: str = "") -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": DOUBLES, "SCRIPTED_STEP_S": str(step_s), ENVIRONMENT: gate}


@contextmanager
def raw_worker(
    *,
    step_s: float = 0.0,
    model_path: str = "scripted",
    model_name: str = "scripted",
    runner: str = SCRIPTED,
    tcp: bool = False,
    key: bytes = b"",
    gate: str = "",
    asleep: bool = False,
    **engine: object,
) -> Iterator[RawWorker]:
    with tempfile.TemporaryDirectory() as directory:
        address = TcpAddress("127.0.0.1", free_port()) if tcp else UnixAddress(f"{directory}/w.sock")
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(step_s, gate)
        )
        worker = RawWorker(process, address)
        try:
            assert process.stdin is not None
            line = launch_line(
                address, model_path=model_path, model_name=model_name, runner=runner, key=key, asleep=asleep,
                **engine,
            )  # fmt: skip
            process.stdin.write(line)
            process.stdin.flush()
            yield worker
        finally:
            worker.end()


def submit(request_id: str, prompt: tuple[int, ...] = (10, 11, 12), **sampling: object) -> Submit:
    return Submit(
        request_id=RequestId(request_id),
        prompt=array("i", prompt).tobytes(),
        sampling=SamplingParams(**sampling),
    )


def wait_gone(pid: int) -> None:
    """Return when this process (anybody's child) is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


def is_ignored(pid: int, number: signal.Signals) -> bool:
    """Whether the process ignores this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
