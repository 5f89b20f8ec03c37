"""Workers as child processes on this machine, each with a supervisor (see supervised.py).

Each listens on a socket in a directory that only this user may enter; or, where other machines shall reach
it, on a port of `host` that is kept for it. A worker cannot outlive this process: the kernel kills it with
the thread that started it, and the end of its standard input tells it too.
"""

import tempfile

from penstock.backends.engine.backend import EngineBackend
from penstock.clock import Clock
from penstock.errors import WorkerUnavailable
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import ReservedPort, TakeSpare, WorkerLogs, WorkerProcess, no_spare
from penstock.fleet.launchers.supervised import SupervisedWorker, SupervisingLauncher
from penstock.protocol.address import UnixAddress, WorkerLaunch, link_key_of


class LocalLauncher(SupervisingLauncher):
    """Starts workers on this machine. `close` it, and nothing of them is left but their logs."""

    def __init__(
        self,
        clock: Clock,
        hash_key: bytes,
        *,
        environment: dict[str, str] | None = None,
        logs: WorkerLogs = WorkerLogs(),  # noqa: B008 - it is frozen.
        host: str = "",
        spare: TakeSpare = no_spare,
    ) -> None:
        """With a `host` workers listen on TCP ports of that address instead of on Unix sockets.

        `spare` may have processes that were begun before.
        """
        super().__init__(clock, hash_key, environment, logs)
        self._host, self._spare = host, spare
        self.link_key = link_key_of(hash_key) if host else b""
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-")  # Mode 0700.
        self._num_started = 0

    async def open(self) -> None:
        """See `Launcher`: this machine is there."""

    async def start(self, spec: WorkerSpec, backend: EngineBackend) -> SupervisedWorker:
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
        hear = self._hearer_of(spec.worker_id)
        process = WorkerProcess(spec.worker_id, launch, address, self._environment, hear, port, self._spare)
        return self._supervise(spec, backend, process)

    async def close(self, *, timeout_s: float) -> None:
        """Stop every worker, all at the same time, and remove their sockets."""
        await super().close(timeout_s=timeout_s)
        self._directory.cleanup()

    def _socket(self) -> UnixAddress:
        self._num_started += 1
        return UnixAddress(f"{self._directory.name}/{self._num_started}.sock")

    def _port(self) -> ReservedPort | None:
        try:
            return ReservedPort(self._host) if self._host else None
        except OSError as error:
            raise WorkerUnavailable(f"there is no port for it on {self._host!r}: {error}") from error
