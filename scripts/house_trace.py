"""Records which functions of the package run in a served process, and which objects of it are alive.

scripts/house.py puts this into a gateway process and its engine worker through a `sitecustomize.py`. A file
called `window` names what is going on outside ("idle", "request", ...). At each change of that name every
traced process writes `<role>-<pid>-<name>.json`: the functions that ran since the change before, by file, and
the number of live instances per class of the package.
"""

import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

POLL_S = 0.02
ROLES = {"penstock.engine.worker": "worker", "serve": "gateway"}


class Tracer:
    """Collects code objects in every thread of this process."""

    def __init__(self, folder: Path, package: str, role: str) -> None:
        """`package` is the folder whose functions count."""
        self._folder, self._package, self._role = folder, package, role
        self._seen: set[CodeType] = set()
        self._window = ""

    def start(self) -> None:
        """Trace this thread and all threads that start later."""
        threading.Thread(target=self._poll, name="house-trace", daemon=True).start()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._seen.add(frame.f_code)

    def _poll(self) -> None:
        path = self._folder / "window"
        while True:
            time.sleep(POLL_S)
            name = path.read_text() if path.exists() else ""
            if name != self._window:
                self._report()
                self._window = name

    def _report(self) -> None:
        seen, self._seen = self._seen, set()
        functions = sorted(
            (code.co_filename.removeprefix(self._package + "/"), code.co_qualname, code.co_firstlineno)
            for code in seen
            if code.co_filename.startswith(self._package + "/") and code.co_name != "<module>"
        )
        report = {"functions": functions, "objects": count_objects()}
        path = self._folder / f"{self._role}-{os.getpid()}-{self._window}.json"
        path.with_suffix(".part").write_text(json.dumps(report))
        path.with_suffix(".part").rename(path)


def count_objects() -> dict[str, int]:
    """Live instances per class of the package, of those that the garbage collector knows."""
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if kind.__module__.startswith("penstock.")
    )


def start() -> None:
    """Trace this process if it is a gateway or an engine worker."""
    for word, role in ROLES.items():
        if word in sys.orig_argv:
            Tracer(Path(os.environ["HOUSE_TRACE_FOLDER"]), os.environ["HOUSE_TRACE_PACKAGE"], role).start()
            return
