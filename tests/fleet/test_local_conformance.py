"""The local launcher does what every launcher must, over both kinds of sockets."""

import contextlib
from pathlib import Path

from launcher_conformance import DOUBLES, LauncherConformance, Place

from penstock.clock import SystemClock
from penstock.fleet.launchers.process import WorkerLogs
from penstock.fleet.launchers.supervised import LocalLauncher


class TestUnixSockets(LauncherConformance):
    HOST = ""

    @contextlib.asynccontextmanager
    async def open(self, directory: Path):
        lines: list[str] = []
        launcher = LocalLauncher(
            SystemClock(),
            b"secret" * 4,
            environment={"PYTHONPATH": DOUBLES, "SCRIPTED_STEP_S": "0.001"},
            logs=WorkerLogs(lines.append, directory),
            host=self.HOST,
        )
        try:
            yield Place(launcher, directory, lines)
        finally:
            await launcher.close(timeout_s=0.1)


class TestPorts(TestUnixSockets):
    HOST = "127.0.0.1"
