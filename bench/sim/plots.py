"""Draws the plots of docs/testing-overload.md, autoscaling.md, rollout.md and cells.md:

    python -m bench.sim.plots [--only NAME]

Everything comes from scenarios with seed 1, or from result files (goodput), so the files change only when the
policies do.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.sim.svg_plots import Axes, Series, bars, lines
from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Spread
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import Verdict, run_scenario
from penstock.sim.scenarios.setup import Knobs, Played, with_settings
from penstock.sim.traffic.prompts import RequestRecord

OUT = Path(__file__).parents[2] / "docs" / "plots"
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def run(name: str, **settings: str) -> Verdict:
    return run_scenario(SCENARIOS[name], with_settings(Knobs(), settings), 1)


def spike() -> dict[str, str]:
    figures = run("spike-20x").played.figures
    windows, objective = figures.windows, figures.objective
    width = windows[1].begins_s if len(windows) > 1 else figures.seconds
    seen = [window for window in windows if window.ttft_p95_ms]
    time = "virtual seconds"
    target = (objective.ttft_ms, f"promised: {objective.ttft_ms:g} ms")
    requests = lines(
        Axes(title="Requests per second, by outcome", x=time, y="requests/s"),
        [
            Series("came", [(w.begins_s, w.arrived / width) for w in windows], 0),
            Series("met both promises", [(w.begins_s, w.good / width) for w in windows], 2),
            Series("refused or dropped", [(w.begins_s, w.refused / width) for w in windows], 1),
        ],
    )
    ttft = lines(
        Axes(title="Time to first token", x=time, y="ms", mark=target),
        [
            Series("p95", [(w.begins_s, w.ttft_p95_ms) for w in seen], 1),
            Series("p50", [(w.begins_s, w.ttft_p50_ms) for w in seen], 0),
        ],
    )
    return {"spike-requests": requests, "spike-ttft": ttft}


def noisy() -> dict[str, str]:
    verdict = run("noisy-tenant")
    assert verdict.baseline is not None
    shown = sorted(verdict.played.figures.tenants)
    sides = (verdict.baseline.figures, verdict.played.figures)
    groups = [
        (name.removeprefix("small-"), [side.tenants[name].ttft_ms.p95 for side in sides]) for name in shown
    ]
    axes = Axes(title="TTFT p95 by tenant: one sends 20 times as much", x="tenants (big is the one)", y="ms")
    return {"noisy-tenant": bars(axes, groups, ["before", "meanwhile"])}


def goodput() -> dict[str, str]:
    """Goodput of the mixed load by load: nothing promised, and the defaults by what refused clients do. Drawn
    from what bench/sim/goodput.py wrote last, since ten seeds of it take minutes.
    """
    sides = [row for row in newest("goodput-sim") if row["side"] == "no promises" and not row["retries"]]
    clients: dict[str, list[dict[str, Any]]] = {"nothing promised, leave": sides}
    for row in newest("goodput-clients"):
        clients.setdefault(row["clients"], []).append(row)
    unit = {
        "goodput-by-load": ("requests", "goodput_rps"),
        "goodput-by-load-tokens": ("tokens", "goodput_tps"),
    }
    found: dict[str, str] = {}
    for file, (name, key) in unit.items():
        axes = Axes(
            title=f"Goodput by load and by what refused clients do: {name} per second",
            x="times the knee", y=f"{name}/s", log_x=True,
        )  # fmt: skip
        rows = clients.items()
        points = [(kind, sorted((row["load"], row[key]) for row in each)) for kind, each in rows]
        found[file] = lines(axes, [Series(kind, each, colour) for colour, (kind, each) in enumerate(points)])
    return found


def newest(name: str) -> list[dict[str, Any]]:
    """The rows of the last result file of this name."""
    return result(name)["rows"]


def result(name: str) -> dict[str, Any]:
    """The last result file of this name."""
    return json.loads(max(RESULTS.glob(f"*-{name}.json")).read_text())


def day() -> dict[str, str]:
    """Minutes lost and machine hours of each rule: means over seeds."""
    rules = result("autoscale")["day"]
    lost = [(name, [of["lost"]["mean"]]) for name, of in rules.items()]
    hours = [(name, [of["hours"]["mean"]]) for name, of in rules.items()]
    x = "rule"
    return {
        "autoscale-lost": bars(
            Axes(title="Minutes of a day in which promises were missed", x=x, y="min"), lost, ["lost"]
        ),
        "autoscale-hours": bars(Axes(title="Machine time of that day", x=x, y="hours"), hours, ["hours"]),
    }


def sudden() -> dict[str, str]:
    """Workers and requests while twenty times as many requests come, of the scenario with seed 1."""
    scaling = run("autoscale-spike").played.scaling
    assert scaling is not None
    seen = scaling.seen

    def line(of: Callable[[int], float]) -> list[tuple[float, float]]:
        return [(seen[i].now_ns / NS_PER_S, of(i)) for i in range(0, len(seen), 2)]

    plot = lines(
        Axes(title="Workers during a spike of twenty times the load", x="virtual seconds", y="workers"),
        [
            Series("to be", line(lambda i: scaling.decisions[i].workers), 0),
            Series("ready", line(lambda i: seen[i].ready), 2),
            Series("wanted, before bounds", line(lambda i: scaling.decisions[i].wanted), 1),
        ],
    )
    return {"autoscale-spike": plot}


def versions() -> dict[str, str]:
    """How many rollouts of a hundred were taken back, and in which step, by the new version's fault."""
    found = result("rollout")["versions"]
    steps = ("1.0", "5.0", "25.0", "50.0")
    groups = [
        (name.replace(" per token", ""), [float(of["in_step"].get(step, 0)) for step in steps])
        for name, of in found.items()
    ]
    axes = Axes(
        title="Rollouts taken back, of a hundred, by step", x="the new version", y="rollouts", y_max=100
    )
    return {"rollout-versions": bars(axes, groups, ["1 %", "5 %", "25 %", "50 %"])}


def cells() -> dict[str, str]:
    """The good share of the cell with the load, alone and with peers, and what peers answer of it."""
    verdict, width = run("cell-spill"), 2.5
    assert verdict.baseline is not None, "it is held against cells without peers"

    def line(played: Played, of: Callable[[RequestRecord], float]) -> list[tuple[float, float]]:
        parts: dict[int, list[float]] = {}
        for each in played.records:
            if each.id.startswith("chat-east"):
                parts.setdefault(int(each.at_ns / NS_PER_S / width), []).append(of(each))
        return [(part * width, sum(found) / len(found)) for part, found in sorted(parts.items())]

    played, alone = verdict.played, verdict.baseline
    axes = Axes(
        title="A cell with five times its load (10 to 25 s)",
        x="virtual seconds",
        y="share of requests",
        y_max=1.0,
    )
    series = [
        Series("answered as promised, with peers", line(played, lambda r: float(played.good(r))), 2),
        Series("the same without peers", line(alone, lambda r: float(alone.good(r))), 1),
        Series("answered by a peer", line(played, lambda r: float(r.worker.startswith("cell:"))), 0),
    ]
    return {"cells-spill": lines(axes, series)}


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
    "day": day, "sudden": sudden, "versions": versions, "cells": cells,
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
