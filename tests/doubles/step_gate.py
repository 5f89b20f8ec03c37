"""Holds a worker process in the middle of a step, for tests of what happens meanwhile."""

import os
import time
from pathlib import Path

ENVIRONMENT = "SCRIPTED_GATE"
"""Names the directory to the scripted runner of a worker process."""


class StepGate:
    """Files in a directory that the test and the worker process share."""

    def __init__(self, directory: str | Path) -> None:
        self._hold, self._held = Path(directory) / "hold", Path(directory) / "held"

    def close(self) -> None:
        """From now on steps do not end."""
        self._held.unlink(missing_ok=True)
        self._hold.touch()

    def open(self) -> None:
        """Let the step end, and all behind it."""
        self._hold.unlink()

    def held_step(self) -> int:
        """The step that does not end; waits for it."""
        for _ in range(60_000):
            if self._held.exists():
                break
            time.sleep(0.001)
        return int(self._held.read_text())

    def enter(self, step: int) -> None:
        """In the worker: a step begins."""
        if not self._hold.exists():
            return
        fresh = self._held.with_suffix(".fresh")
        fresh.write_text(str(step))
        os.replace(fresh, self._held)
        while self._hold.exists():
            time.sleep(0.001)
