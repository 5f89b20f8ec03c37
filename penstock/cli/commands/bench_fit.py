"""`penstock bench --fit`: measures the steps of our own engine, and says how well a law tells the time of
steps it never saw.
"""

from pathlib import Path

from rich.table import Table

from penstock.cli import console
from penstock.cli.console import check_place
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.config.presets import resolve
from penstock.errors import ConfigError
from penstock.planning.steps_file import fit, write_steps

_TERMS = ("a step", "a token", "a row", "a KV token read", "a pair in a chunk's attention")


def fit_steps(model: str, json_path: Path | None, *, seed: int) -> int:
    """Measure, fit, tell, and write the samples.

    Raises:
        ConfigError: no file to write, or it cannot be written.
        OperatorError: the model cannot be served here.
    """
    if json_path is None or str(json_path) == "-":
        raise ConfigError("--fit needs --json FILE: where the measured steps are written")
    check_place(json_path)
    # Here, because it imports torch, which the rest of `penstock bench` does without.
    from penstock.bench.fit import measure_steps

    screen = console.err()

    def progress(stage: str, done: int, total: int) -> None:
        screen.print(f"{stage} ({done} of {total})" if total else stage, markup=False, soft_wrap=True)

    measured = measure_steps(
        str(resolve(model)), EngineSettings(), SystemClock(), seed=seed, progress=progress
    )
    law, error = fit(measured.steps)
    write_steps(json_path, measured)
    table = Table("what", title=f"{len(measured.steps)} steps of {measured.name}", title_justify="left")
    table.add_column("microseconds", justify="right")
    for name, value in zip(_TERMS, law.coefficients, strict=True):
        table.add_row(name, f"{value / 1000:.4g}")
    console.out().print(table)
    console.out().print(
        f"error on {error.steps} held-back steps: median {error.median:.1%}, mean {error.mean:.1%}, p95 "
        f"{error.p95:.1%}; the sum of all is off by {error.bias:+.1%}", markup=False, soft_wrap=True,
    )  # fmt: skip
    screen.print(f"wrote {json_path}", markup=False, soft_wrap=True)
    return 0
