"""How loading is shown: a bar per model on a terminal, a line per stage elsewhere."""

from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.backends.base import BackendStatus


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
