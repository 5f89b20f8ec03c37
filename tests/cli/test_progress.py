import io

from rich.console import Console

from penstock.backends.base import BackendStatus, Phase
from penstock.cli.wiring.progress import loading_display


def loading(stage: str, done: int = 0, total: int = 0) -> BackendStatus:
    return BackendStatus(Phase.LOADING, stage=stage, done=done, total=total)


READY = BackendStatus(Phase.READY, stage="ready")


def shown(*statuses: BackendStatus, terminal: bool) -> str:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100, color_system=None)
    with loading_display(console) as display:
        for status in statuses:
            display.update("tiny [one]", status)
    return written.getvalue()


def test_elsewhere_than_on_a_terminal_a_line_tells_each_stage_once() -> None:
    statuses = [loading("loading weights", done, 10) for done in (0, 5, 10)]
    reported = shown(*statuses, loading("warming up"), READY, terminal=False)
    assert reported.splitlines() == [
        "tiny [one]: loading weights",
        "tiny [one]: warming up",
        "tiny [one]: ready",
    ]


def test_on_a_terminal_a_bar_tells_how_far_a_model_is() -> None:
    none, half, whole = (
        shown(each, terminal=True) for each in (loading("weights", 0, 10), loading("weights", 5, 10), READY)
    )
    for reported, stage in ((none, "weights"), (half, "weights"), (whole, "ready")):
        assert "tiny [one]" in reported
        assert stage in reported
    # What is done is drawn as a heavy line, the rest is another character or color: more of it is not the
    # same picture.
    assert len({none, half, whole}) == 3
