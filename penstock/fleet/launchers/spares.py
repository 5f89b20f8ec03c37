"""Worker processes that are begun before it is known what they are to do.

Half of a worker's start-up is Python and torch. `penstock serve` begins its workers before it imports its own
gateway and reads tokenizers, so both happen at once, on two cores. A spare imports and then waits for its
launch line, like any other worker; one that nobody takes is ended.
"""

import contextlib
from asyncio.subprocess import Process
from collections.abc import Iterable, Mapping

from penstock.fleet.launchers.process import create_process, environment_of
from penstock.protocol.launch import REAL_RUNNER


class Spares:
    """Those that nobody has taken yet. `close` it when all workers have been started."""

    def __init__(self, module: str = REAL_RUNNER.partition(":")[0]) -> None:
        """`module` is what they import."""
        self._module = module
        self._waiting: list[tuple[dict[str, str], Process]] = []

    async def begin(self, threads: Iterable[int]) -> None:
        """One for each worker of so many threads.

        Without a process to be had there is no spare: a worker's own start says why.
        """
        for count in threads:
            environment = environment_of(count)
            with contextlib.suppress(OSError):
                self._waiting.append((environment, await create_process(environment, self._module)))

    def take(self, environment: Mapping[str, str]) -> Process | None:
        """One that was begun in this environment, if there is one."""
        for i, (begun_in, process) in enumerate(self._waiting):
            if begun_in == environment and process.returncode is None:
                del self._waiting[i]
                return process
        return None

    async def close(self) -> None:
        """End those that are left."""
        left, self._waiting = self._waiting, []
        for _, process in left:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for _, process in left:
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()
