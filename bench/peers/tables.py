"""The tables for people: one per level, one for start-up and long prompts, one for the goals."""

from collections.abc import Iterable

from rich.table import Table

from bench.peers.engines import VARIANTS
from bench.peers.figures import (
    ARRIVAL,
    MEMORY,
    PREFIX,
    READY,
    Column,
    Run,
    Spread,
    Verdict,
    best_peer,
    columns,
    ratio,
    spread,
    values,
)

PEERS_16_BITS = tuple(one.name for one in VARIANTS if one.engine != "ours" and one.bits == 16)
CAPTION = "median (least to most of the rounds); x: times better than the best 16-bit peer of that column"


def level_table(runs: list[Run], model: str, callers: int) -> Table:
    """Throughput and latencies of every variant at one level."""
    shown = columns([callers])[:5]
    rated = {0, 1, 3}
    table = _titled(f"{model}, {callers} at once")
    table.add_column("engine", no_wrap=True)
    for place, column in enumerate(shown):
        name = column.title.partition(" ")[2]
        table.add_column(name if "tok/s" in name else f"{name} ms", justify="right")
        if place in rated:
            table.add_column("x", justify="right")
    table.add_column("failed", justify="right")
    for variant in _variants(runs, model):
        cells: list[str] = []
        for place, column in enumerate(shown):
            if place in rated:
                cells.append(_figure(runs, model, variant, column))
                cells.append(_times(runs, model, variant, column))
            else:
                cells.append(_middle(spread(values(runs, model, variant, column).values()), column.digits))
        failed = sum(
            level.failed
            for run in runs
            if (run.model, run.variant) == (model, variant)
            for level in run.levels
            if level.callers == callers
        )
        table.add_row(variant, *cells, str(failed) if failed else "", style=_style(variant))
    return table


def footprint_table(runs: list[Run], model: str) -> Table:
    """Start-up, memory, the shared prefix, and what a long prompt does to running streams."""
    shown = [READY, MEMORY, *_prefix_columns(), PREFIX, *_arrival_columns(), ARRIVAL]
    table = _titled(f"{model}, start-up, memory and long prompts (times in ms)")
    table.add_column("engine", no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify="right")
    for variant in _variants(runs, model):
        cells = [_middle(spread(values(runs, model, variant, one).values()), one.digits) for one in shown]
        table.add_row(variant, *cells, style=_style(variant))
    table.caption = (
        "1,500 shared tokens: TTFT of a miss and a hit; gaps of 8 streams before and while 1,000 words arrive"
    )
    return table


def goal_table(verdicts: Iterable[Verdict]) -> Table:
    """The goals and the measurements."""
    table = _titled("Goals")
    for name in ("model", "figure", "ours", "against"):
        table.add_column(name)
    for name in ("measured", "goal", ""):
        table.add_column(name, justify="right")
    for one in verdicts:
        goal = one.goal
        bound = f"<= {goal.at_most:g}" if goal.at_most is not None else f">= {goal.at_least:g}x"
        unit = "" if goal.at_most is not None else "x"
        measured = f"{one.middle:.2f}{unit} ({one.least:.2f} to {one.limit:.2f})"
        mark = "[green]met[/]" if one.met else "[red]short[/]"
        table.add_row(goal.model, goal.title, goal.ours, one.peer or "itself", measured, bound, mark)
    return table


def run_line(run: Run) -> str:
    """One finished run in a line."""
    parts = [f"ready {run.ready_s:.1f} s", f"{run.resident_bytes / 1e9:.2f} GB"]
    parts += [
        f"c={one.callers} {one.output_tokens_per_s:.0f} tok/s, TTFT {one.ttft_p50_ms:.0f}, TPOT "
        f"{one.tpot_p50_ms:.1f} ms"
        for one in run.levels
    ]
    if run.prefix:
        parts.append(f"prefix {run.prefix.miss_ms:.0f} -> {run.prefix.hit_ms:.0f} ms")
    if run.arrival:
        parts.append(f"gaps {run.arrival.before_p50_ms:.1f} -> p99 {run.arrival.during_p99_ms:.1f} ms")
    return "; ".join(parts)


def _prefix_columns() -> list[Column]:
    return [
        Column("miss", lambda run: run.prefix.miss_ms if run.prefix else None, digits=0),
        Column("hit", lambda run: run.prefix.hit_ms if run.prefix else None, digits=0),
    ]


def _arrival_columns() -> list[Column]:
    return [
        Column("gap p50 before", lambda run: run.arrival.before_p50_ms if run.arrival else None),
        Column("p50 during", lambda run: run.arrival.during_p50_ms if run.arrival else None),
        Column("p99 during", lambda run: run.arrival.during_p99_ms if run.arrival else None),
        Column("most", lambda run: run.arrival.during_max_ms if run.arrival else None),
    ]


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", caption_justify="left")


def _variants(runs: list[Run], model: str) -> list[str]:
    """Variants with figures of this model, in the order of the table of variants."""
    known = {run.variant for run in runs if run.model == model}
    return [variant.name for variant in VARIANTS if variant.name in known]


def _style(variant: str) -> str:
    return "bold" if variant.startswith("ours") else ""


def _figure(runs: list[Run], model: str, variant: str, column: Column) -> str:
    found = spread(values(runs, model, variant, column).values())
    if found is None:
        return "-"
    digits = column.digits
    if found.count == 1:
        return f"{found.middle:,.{digits}f}"
    return f"{found.middle:,.{digits}f} ({found.least:,.{digits}f} to {found.limit:,.{digits}f})"


def _times(runs: list[Run], model: str, variant: str, column: Column) -> str:
    peer = best_peer(runs, model, PEERS_16_BITS, column)
    found = ratio(runs, model, variant, peer, column) if peer else None
    return _middle(found, 2)


def _middle(found: Spread | None, digits: int) -> str:
    return f"{found.middle:,.{digits}f}" if found else "-"
