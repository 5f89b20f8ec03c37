"""Tables of `penstock simulate` and `penstock plan` for a terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from penstock.sim.report.compare import Difference
from penstock.sim.report.figures import Figures, Spread
from penstock.sim.scenarios.scenario import Finding, Scenario, Verdict

TENANTS_SHOWN = 10


def scenario_list(scenarios: Mapping[str, Scenario]) -> Table:
    """What there is, and what each answers."""
    table = Table(title="scenarios", show_lines=False, title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("question")
    for name, scenario in scenarios.items():
        table.add_row(name, scenario.question)
    return table


def findings_table(findings: Sequence[Finding]) -> Table:
    """What was checked, and whether it passes."""
    table = Table("checked", title="criterion", title_justify="left")
    for column in ("found", "bound", ""):
        table.add_column(column, justify="right")
    for finding in findings:
        sign = "<=" if finding.at_most else ">="
        verdict = "[green]passes[/]" if finding.passed else "[red]fails[/]"
        table.add_row(finding.words, f"{finding.value:.4g}", f"{sign} {finding.bound:g}", verdict)
    return table


def figures_table(figures: Figures) -> Table:
    """The figures of one run that have no distribution."""
    table = Table("figure", title="one run", title_justify="left")
    table.add_column("", justify="right")
    ends = ", ".join(f"{count:,} {name}" for name, count in figures.outcomes.items())
    rows = (
        ("requests", f"{figures.requests:,}"),
        ("ended", ends),
        ("met both promises", f"{figures.attainment:.1%}"),
        ("goodput", f"{figures.goodput_rps:.2f} requests/s, {figures.goodput_tps:,.0f} output tokens/s"),
        ("throughput", f"{figures.throughput_tps:,.0f} output tokens/s"),
        ("prefix hit rate", f"{figures.hit_rate:.1%}"),
        ("fairness (Jain)", f"{figures.jain:.3f}"),
        ("largest service gap", f"{figures.service_gap:,.0f} tokens"),
        ("workers' time in steps", f"{figures.utilisation:.0%}"),
        ("cost", f"{figures.cost:,.2f}, per 1M output tokens {figures.cost_per_million:,.2f}"),
        ("SLO minutes lost", f"{figures.slo_minutes_lost:.2f} of {figures.seconds / 60:.2f}"),
    )
    for row in rows:
        table.add_row(*row)
    for reason, count in figures.reasons.items():
        table.add_row(f"  because of {reason}", f"{count:,}")
    return table


def latency_table(figures: Figures) -> Table:
    """Distributions in milliseconds."""
    table = Table("milliseconds", title="latency", title_justify="left")
    for column in ("requests", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    named: tuple[tuple[str, Spread], ...] = (
        ("time to first token", figures.ttft_ms), ("time per output token", figures.tpot_ms),
        ("end to end", figures.e2e_ms), ("in the queue", figures.queue_ms),
    )  # fmt: skip
    for name, spread in named:
        values = (spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
        table.add_row(name, f"{spread.count:,}", *(f"{value:,.1f}" for value in values))
    return table


def tenants_table(figures: Figures) -> Table:
    """The tenants with the most requests."""
    table = Table("tenant", title="tenants", title_justify="left")
    for column in ("requests", "good", "TTFT p95 ms", "served tokens", "of wanted"):
        table.add_column(column, justify="right")
    shown = sorted(figures.tenants.items(), key=lambda item: -item[1].requests)[:TENANTS_SHOWN]
    for name, tenant in shown:
        table.add_row(
            name, f"{tenant.requests:,}", f"{tenant.good / tenant.requests:.1%}",
            f"{tenant.ttft_ms.p95:,.0f}", f"{tenant.served:,.0f}",
            f"{tenant.served / tenant.wanted:.0%}" if tenant.wanted else "-",
        )  # fmt: skip
    return table


def seeds_table(verdicts: Sequence[Verdict]) -> Table:
    """One line per seed."""
    table = Table("seed", title=f"{len(verdicts)} seeds", title_justify="left")
    for column in ("requests", "good", "TTFT p95 ms", "TPOT p95 ms", "hit rate", "Jain", "criterion"):
        table.add_column(column, justify="right")
    for verdict in verdicts:
        figures = verdict.played.figures
        table.add_row(
            str(verdict.played.seed), f"{figures.requests:,}", f"{figures.attainment:.1%}",
            f"{figures.ttft_ms.p95:,.0f}", f"{figures.tpot_ms.p95:,.1f}", f"{figures.hit_rate:.1%}",
            f"{figures.jain:.3f}", "[green]passes[/]" if verdict.passed else "[red]fails[/]",
        )  # fmt: skip
    return table


def compare_table(names: tuple[str, str], found: Sequence[Difference], num_seeds: int) -> Table:
    """Two configurations side by side."""
    table = Table("figure", title=f"A: {names[0]}\nB: {names[1]}\n{num_seeds} seeds", title_justify="left")
    for column in ("A", "B", "B - A", "95 % interval (paired t)"):
        table.add_column(column, justify="right")
    table.add_column("B is")
    colours = {"better": "green", "worse": "red"}
    for each in found:
        interval = f"{each.low:+.4g} to {each.high:+.4g}"
        colour = colours.get(each.verdict, "dim")
        table.add_row(
            each.words, f"{each.a:.4g}", f"{each.b:.4g}", f"{each.difference:+.4g}", interval,
            f"[{colour}]{each.verdict}[/]",
        )  # fmt: skip
    return table
