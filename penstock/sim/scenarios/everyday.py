"""Scenarios of ordinary days: steady load, bursts, a day's rhythm, conversations, agents."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.clock import NS_PER_S
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.scenario import (
    ANSWER,
    WORKER_RPS,
    Finding,
    answered,
    at_least,
    chat,
    no_failures,
    pool,
    scenario,
    setup,
)
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.workload import (
    Callers,
    Conversations,
    Diurnal,
    Gamma,
    LengthDistribution,
    Poisson,
    agents,
    even,
)


def _check_steady(played: Played, _: Played | None) -> Sequence[Finding]:
    figures = played.figures
    return (
        answered(played), no_failures(played),
        at_least("SLO attainment", figures.attainment, 0.97),
        at_least("fairness (Jain)", figures.jain, 0.95),
        at_least("workers' time in steps", figures.utilisation, 0.5),
    )  # fmt: skip


@scenario(_check_steady)
def steady(knobs: Knobs) -> Setup:
    """Does a fleet at two thirds of its load keep what it promises, and is it more than half used?

    Eight tenants of one size, Poisson arrivals. The baseline of everything else.
    """
    return setup(knobs, [pool(knobs, workers=3)], [chat(knobs, 0.65, 3)], seconds=40)


def _check_bursts(played: Played, _: Played | None) -> Sequence[Finding]:
    return (answered(played), no_failures(played), at_least("SLO attainment", played.figures.attainment, 0.9))


@scenario(_check_bursts)
def bursts(knobs: Knobs) -> Setup:
    """What do bursty arrivals cost, as recorded services have them (gaps with a variation of 3)?

    The queue takes the bursts; nothing is refused at half load.
    """
    source = replace(chat(knobs, 0.5, 3), arrivals=Gamma(WORKER_RPS * 3 * 0.5 * knobs.load, cv=3.0))
    return setup(knobs, [pool(knobs, workers=3)], [source], seconds=40)


def _check_diurnal(played: Played, _: Played | None) -> Sequence[Finding]:
    return (
        answered(played),
        at_least("SLO attainment", played.figures.attainment, 0.95),
        at_least("workers' time in steps", played.figures.utilisation, 0.5),
    )


@scenario(_check_diurnal)
def diurnal(knobs: Knobs) -> Setup:
    """Is more than half of the machines' time used over a day, when the number of workers follows a schedule?

    A day in 100 seconds: from 2 workers at night to 6 at noon, ahead of the load by their cold start.
    """
    day = 100.0
    source = replace(chat(knobs, 1.0, 1), arrivals=Diurnal(4.0 * knobs.load, 20.0 * knobs.load, day_s=day))
    plan = ((0.18, 4), (0.32, 6), (0.68, 4), (0.82, 2))
    main = replace(
        pool(knobs, workers=2, cold_start_s=3),
        schedule=tuple((round(day * share * NS_PER_S), count) for share, count in plan),
    )
    return setup(knobs, [main], [source], seconds=day)


def _check_conversations(played: Played, _: Played | None) -> Sequence[Finding]:
    return (
        answered(played), no_failures(played),
        at_least("SLO attainment", played.figures.attainment, 0.95),
        at_least("prefix hit rate", played.figures.hit_rate, 0.4),
    )  # fmt: skip


@scenario(_check_conversations)
def conversations(knobs: Knobs) -> Setup:
    """How much of the prompts of conversations is found again, over several workers?

    Every turn repeats what was said; the router has to send it where that is.
    """
    source = Conversations(
        arrivals=Poisson(1.2 * knobs.load), callers=Callers(tenants=even(6)), system_tokens=480,
        output=ANSWER, message=LengthDistribution(60, 0.8, maximum=2048), think_s=6, context_max=6000,
    )  # fmt: skip
    return setup(knobs, [pool(knobs, workers=4)], [source], seconds=60)


@scenario(_check_conversations)
def agent_loops(knobs: Knobs) -> Setup:
    """Do agents, with long prompts of tools and a call every few seconds, find their prefixes again?

    Three tenants' agents; a tool's result of any size is added at every call.
    """
    source = agents(
        arrivals=Poisson(0.15 * knobs.load), callers=Callers(tenants=even(3)), system_tokens=4000,
        message=LengthDistribution(150, 1.0, maximum=2048), output=LengthDistribution(40, 0.7, maximum=256),
        context_max=12_000, turns=8.0,
    )  # fmt: skip
    return setup(
        knobs, [pool(knobs, workers=4)], [source], seconds=60, objective=Objective(ttft_ms=4000, tpot_ms=200)
    )
