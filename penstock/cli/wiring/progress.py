"""Models that load, as an operator sees them (a bar per model on a terminal, a line per stage elsewhere), and
workers that come and go (`FleetLog`).
"""

import asyncio
from collections import deque
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.backends.base import BackendStatus
from penstock.fleet.registry import Registry, Worker
from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.worker import FALLING_ASLEEP
from penstock.telemetry.audit import Notes
from penstock.telemetry.log import Log
from penstock.types import WorkerId


class LoadingDisplay:
    """Shows how far each model is: here, a line whenever its stage changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, str] = {}

    def update(self, model: str, status: BackendStatus) -> None:
        """Show the present state; may be called often."""
        if self._shown.get(model) != status.stage:
            self._shown[model] = status.stage
            self._console.print(f"{model}: {status.stage}", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Bars(LoadingDisplay):
    """A bar per model, gone once everything is loaded."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[stage]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def update(self, model: str, status: BackendStatus) -> None:
        if model not in self._tasks:
            self._tasks[model] = self._progress.add_task(escape(model), total=None, stage="")
        total = 1 if status.ready else status.total or None
        done = 1 if status.ready else status.done
        self._progress.update(self._tasks[model], total=total, completed=done, stage=escape(status.stage))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def loading_display(console: Console) -> LoadingDisplay:
    """The display that fits where the output goes."""
    return _Bars(console) if console.is_terminal else LoadingDisplay(console)


# Says in the log what happens to workers, and notes it for the audit trail, once things have calmed down
# for a moment. /ready tells clients.

CALM_S = 0.3
"""Loading within this time is one line: a worker that is lost says why a moment later."""


class FleetLog:
    """Listens from the moment it is made."""

    def __init__(self, registry: Registry, log: Log, notes: Notes, *, only_attached: bool = False) -> None:
        """`only_attached`: of the workers that were launched another process says it."""
        self._registry, self._log, self._only_attached = registry, log, only_attached
        self._notes = notes
        self._changed: dict[WorkerId, Worker] = {}
        self._workers: dict[WorkerId, str] = {}
        """The last report of each worker: "ready", or the stage that it is in instead."""
        self._routes: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        for worker in registry:
            self._workers[worker.id] = _word(worker)
            self._routes[worker.route] = self._route_word(worker.route)
        registry.listen(self._note)

    def close(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._changed.clear()

    def _note(self, worker: Worker) -> None:
        if self._only_attached and worker.shares_key and not worker.hash_key:
            return
        if self._workers.get(worker.id) == _word(worker) and worker in self._registry.of(worker.route):
            return
        self._changed[worker.id] = worker
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CALM_S, self._say)

    def _say(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, {}
        for worker in changed.values():
            self._say_worker(worker)
        for route in dict.fromkeys(worker.route for worker in changed.values()):
            self._say_route(route)

    def _say_worker(self, worker: Worker) -> None:
        is_there = self._registry.get(worker.id) is worker
        word, before = _word(worker), self._workers.get(worker.id)
        if is_there:
            self._workers[worker.id] = word
        else:
            self._workers.pop(worker.id, None)
        if not is_there:
            self._log.info("a worker has left", model=worker.route, worker=worker.id)
            self._notes.note("worker", "left", worker.id, why=f"model {worker.route}")
        elif word == before:
            return
        elif worker.sleeps:
            if worker.state is WorkerState.ASLEEP:
                self._log.info("a worker is asleep", model=worker.route, worker=worker.id)
                self._notes.note("worker", "is asleep", worker.id, why=f"model {worker.route}")
        elif word == "ready":
            self._log.info(
                "a worker is ready",
                model=worker.route,
                worker=worker.id,
                restarts=worker.backend.status.restarts,
            )
            self._notes.note("worker", "is ready", worker.id, why=f"model {worker.route}")
        else:
            # The stages of a start are no news; that it begins, and that it was in vain, is.
            if before in (None, "ready") or worker.problem or worker.backend.status.is_given_up:
                self._notes.note("worker", "is not ready", worker.id, why=word)
            if len(self._registry.of(worker.route)) > 1:
                self._log.warning("a worker is not ready", model=worker.route, worker=worker.id, why=word)

    def _say_route(self, route: str) -> None:
        word, before = self._route_word(route), self._routes.get(route, "ready")
        self._routes[route] = word
        if word == before:
            return
        if word == "ready":
            self._log.info("the model is ready again", model=route)
        else:
            self._log.error("the model cannot answer", model=route, why=word)

    def _route_word(self, route: str) -> str:
        workers = self._registry.of(route)
        if workers.is_ready or workers.sleeps:
            return "ready"
        stage = workers.summary().stage
        return "ready" if stage == FALLING_ASLEEP else stage  # A request wakes it.


def _word(worker: Worker) -> str:
    return "ready" if worker.is_ready else worker.stage


HELD_LINES_MAX = 500


class WorkerLogBuffer:
    """Output of workers, held back while models load: a failure to load has a message of its own."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._held: deque[str] | None = deque(maxlen=HELD_LINES_MAX)

    def say(self, line: str) -> None:
        """One line of a worker's standard error."""
        if self._held is None:
            self._log.info(line)
        else:
            self._held.append(line)

    def forget(self) -> None:
        """Drop what is held back."""
        if self._held is not None:
            self._held.clear()

    def release(self) -> None:
        """Log what is held back, and hold back nothing more."""
        held, self._held = self._held, None
        for line in held or ():
            self._log.info(line)
