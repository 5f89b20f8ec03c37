"""Draws the plots of docs/testing-overload.md: python bench/sim_plots.py [--only NAME]

Everything comes from scenarios with seed 1, so the files change only when the policies do.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Figures, Spread
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
    """Goodput and throughput, in requests and in output tokens."""
    runs = [(load, run("steady", load=f"{load}", seconds="20").played.figures) for load in LOADS]

    def drawn(unit: str, good: Callable[[Figures], float], all_of: Callable[[Figures], float]) -> str:
        series = [
            Series("answered", [(load, all_of(figures)) for load, figures in runs], 0),
            Series("met both promises (goodput)", [(load, good(figures)) for load, figures in runs], 2),
        ]
        title, x = f"Goodput in {unit} per second, by load", "times the steady scenario's load"
        return lines(Axes(title=title, x=x, y=f"{unit}/s", log_x=True), series)

    return {
        "goodput-by-load": drawn(
            "requests", lambda f: f.goodput_rps, lambda f: f.outcomes.get("finished", 0) / f.seconds
        ),
        "goodput-by-load-tokens": drawn("output tokens", lambda f: f.goodput_tps, lambda f: f.throughput_tps),
    }


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
