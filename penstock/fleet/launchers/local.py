"""Workers as child processes on this machine, each with a supervisor (see supervised.py).

Each listens on a socket in a directory that only this user may enter; or, where other machines shall reach it, on a port
of `host` that is kept for it. A worker cannot outlive this process: the kernel kills it with the thread that started it,
and the end of its standard input tells it too.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.backends.own import OwnBackend
from penstock.clock import Clock
from penstock.config.launch import WorkerLaunch
from penstock.errors import WorkerUnavailable
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.log_file import LOG_BYTES_MAX, tee
from penstock.fleet.launchers.ports import ReservedPort
from penstock.fleet.launchers.process import WorkerProcess, stderr_line
from penstock.fleet.launchers.supervised import SupervisedWorker
from penstock.protocol.address import UnixAddress
from penstock.protocol.worker_auth import link_key_of
from penstock.types import WorkerId


class LocalLauncher:
    """Starts workers on this machine. `close` it, and nothing of them is left but their logs."""

    def __init__(
        self,
        clock: Clock,
        hash_key: bytes,
        *,
        environment: dict[str, str] | None = None,
        log: Callable[[str], None] = stderr_line,
        log_directory: Path | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
        host: str = "",
    ) -> None:
        """`log` hears every line that a worker prints; with a `log_directory` they are kept there too, in a file for each
        worker. With a `host` workers listen on TCP ports of that address instead of on Unix sockets.
        """
        self._clock, self._hash_key, self._host = clock, hash_key, host
        self.link_key = link_key_of(hash_key) if host else b""
        self._environment, self._log = environment or {}, log
        self._log_directory, self._log_bytes_max = log_directory, log_bytes_max
        self._workers: dict[WorkerId, SupervisedWorker] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-")  # Mode 0700.
        self._num_started = 0

    async def open(self) -> None:
        """See `Launcher`: this machine is there."""

    async def start(self, spec: WorkerSpec, backend: OwnBackend) -> SupervisedWorker:
        """Start a worker process and return at once; see `SupervisedWorker.wait_ready`.

        Raises:
            WorkerUnavailable: there is no port for it.
        """
        assert spec.worker_id not in self._workers, f"{spec.worker_id} runs already"
        port = self._port()
        address = port.address if port is not None else self._socket()
        launch = WorkerLaunch(
            model_path=spec.model_path,
            model_name=spec.model_name,
            address=str(address),
            shares_port=bool(self._host),
            hash_key=self._hash_key,
            key=self.link_key,
            engine=spec.engine,
            runner=spec.runner,
        )
        process = WorkerProcess(
            spec.worker_id, launch, address, self._environment, self._logs(spec.worker_id), port
        )
        worker = SupervisedWorker(spec, backend, process, self._clock)
        self._workers[spec.worker_id] = worker
        worker.start()
        return worker

    async def stop(self, worker_id: WorkerId, *, timeout_s: float) -> None:
        """Drain the worker, up to the timeout, and end its process. Unknown ids are stopped already."""
        if (worker := self._workers.pop(worker_id, None)) is not None:
            await worker.stop(timeout_s)

    def list(self) -> tuple[SupervisedWorker, ...]:
        """Every worker that was started and not stopped."""
        return tuple(self._workers.values())

    async def close(self, *, timeout_s: float) -> None:
        """Stop every worker, all at the same time, and remove their sockets."""
        await asyncio.gather(
            *(self.stop(worker_id, timeout_s=timeout_s) for worker_id in list(self._workers))
        )
        self._directory.cleanup()

    def _socket(self) -> UnixAddress:
        self._num_started += 1
        return UnixAddress(f"{self._directory.name}/{self._num_started}.sock")

    def _port(self) -> ReservedPort | None:
        try:
            return ReservedPort(self._host) if self._host else None
        except OSError as error:
            raise WorkerUnavailable(f"there is no port for it on {self._host!r}: {error}") from error

    def _logs(self, worker_id: WorkerId) -> Callable[[str], None]:
        return tee(self._log, self._log_directory, worker_id, self._clock, bytes_max=self._log_bytes_max)
