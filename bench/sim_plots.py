"""Draws the plots of docs/testing-overload.md: python bench/sim_plots.py [--only NAME]

Everything comes from scenarios with seed 1, so the files change only when the policies do.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Spread
from penstock.sim.report.html import Axes, Series, bars, lines, run_plots
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import Verdict, run_scenario
from penstock.sim.scenarios.setup import Knobs, with_settings

OUT = Path(__file__).parents[1] / "docs" / "plots"
LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)


def run(name: str, **settings: str) -> Verdict:
    return run_scenario(SCENARIOS[name], with_settings(Knobs(), settings), 1)


def spike() -> dict[str, str]:
    played = run("spike-20x").played
    plots = run_plots(played.figures, played.records)
    return {"spike-requests": plots[0], "spike-ttft": plots[1]}


def noisy() -> dict[str, str]:
    verdict = run("noisy-tenant")
    assert verdict.beside is not None
    shown = sorted(verdict.played.figures.tenants)
    sides = (verdict.beside.figures, verdict.played.figures)
    groups = [
        (name.removeprefix("small-"), [side.tenants[name].ttft_ms.p95 for side in sides]) for name in shown
    ]
    axes = Axes(title="TTFT p95 by tenant: one sends 20 times as much", x="tenants (big is the one)", y="ms")
    return {"noisy-tenant": bars(axes, groups, ["before", "meanwhile"])}


def goodput() -> dict[str, str]:
    points: list[tuple[float, float, float]] = []
    for load in LOADS:
        figures = run("steady", load=f"{load}", seconds="20").played.figures
        points.append((load, figures.goodput_tps, figures.throughput_tps))
    series = [
        Series("all", [(x, y) for x, _, y in points], 0),
        Series("good", [(x, y) for x, y, _ in points], 2),
    ]
    axes = Axes(
        title="Output tokens per second, by load",
        x="times the steady scenario's load",
        y="tokens/s",
        log_x=True,
    )
    return {"goodput-by-load": lines(axes, series)}


def priority() -> dict[str, str]:
    groups: list[tuple[str, Sequence[float]]] = []
    for scheduling in ("fair", "priority"):
        records = run("priority-overload", scheduling=scheduling).played.records
        values = [
            Spread.of([r.ttft_ns for r in records if r.first_ns >= 0 and r.tenant.startswith(kind)]).p95
            / 1000
            for kind in ("paid", "free")
        ]
        groups.append((f"engine: scheduling {scheduling}", values))
    axes = Axes(title="TTFT p95 at twice the capacity", x="what orders the engine's own queue", y="seconds")
    return {"priority-ttft": bars(axes, groups, ["priority band", "default band"])}


def restart() -> dict[str, str]:
    records = run("rolling-restart").played.records
    width, points = 5, list[tuple[float, float]]()
    for begins in range(0, 90, width):
        part = [r for r in records if begins <= r.at_ns / NS_PER_S < begins + width and r.first_ns >= 0]
        prompt = sum(r.prompt_tokens for r in part)
        if prompt:
            points.append((float(begins), sum(r.cached_tokens for r in part) / prompt))
    axes = Axes(
        title="Prefix hit rate while every worker is replaced (32 s)",
        x="virtual seconds",
        y="share",
        y_max=1.0,
    )
    return {"rolling-restart": lines(axes, [Series("cached share of prompt tokens", points, 4)])}


DRAWN: dict[str, Callable[[], dict[str, str]]] = {
    "spike": spike, "noisy": noisy, "goodput": goodput, "priority": priority, "restart": restart,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=DRAWN, action="append")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    for name in args.only or DRAWN:
        for file, plot in DRAWN[name]().items():
            (OUT / f"{file}.svg").write_text(plot + "\n")
            print(f"wrote {OUT / file}.svg ({len(plot)} characters)")


if __name__ == "__main__":
    main()
