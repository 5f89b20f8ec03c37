"""A plan played in the simulator: the replicas that the planner chose, under Poisson arrivals of the traffic
it was made for.
"""

from collections.abc import Sequence

from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import Config
from penstock.planning.plan import Demand, Option, Terms
from penstock.planning.roofline import Accelerator, ModelShape, Placed, Roofline
from penstock.sim.report.figures import Figures, Objective
from penstock.sim.scenarios.scenario import kind_of
from penstock.sim.scenarios.setup import Setup, play, promised
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, even
from penstock.sim.world.run import PoolSpec, WorldSpec
from penstock.sim.world.worker import SimWorkerSpec

REPLICAS_MAX = 4
"""Played at most: a larger plan is played in part, with its part of the traffic, which is only harder (less
is pooled)."""
REQUESTS = 400
"""About so many."""


def check_plan(
    option: Option,
    model: ModelShape,
    demand: Demand,
    terms: Terms,
    devices: Sequence[Accelerator],
    *,
    seed: int = 1,
) -> Figures:
    """The figures of a short run of the option (or of a part of it): without its spares, since those may be
    lost.
    """
    device = next(each for each in devices if each.name == option.device)
    placed = Placed(model=model, device=device, tp=option.tp, dtype=option.dtype)
    needed = max(1, option.replicas - terms.spare)
    count = min(needed, REPLICAS_MAX)
    rate = demand.rps * count / needed
    spec = SimWorkerSpec(
        step_time=Roofline(placed), num_blocks=placed.num_blocks, max_model_len=model.max_model_len,
        engine=EngineSettings(step_tokens=terms.step_tokens, max_running=option.batch), kind=kind_of(placed),
    )  # fmt: skip
    shared = int(demand.hit_rate * demand.prompt_tokens)
    source = Chat(
        arrivals=Poisson(rate), callers=Callers(tenants=even(1)), system_tokens=shared,
        prompt=LengthDistribution(demand.prompt_tokens - shared, 0.0, maximum=1 << 30),
        output=LengthDistribution(demand.output_tokens, 0.0, maximum=1 << 30),
    )  # fmt: skip
    objective = Objective(ttft_ms=terms.ttft_ms, tpot_ms=terms.tpot_ms)
    played = play(
        Setup(
            world=WorldSpec(config=Config(admission=promised(objective)),
                pools=(PoolSpec(worker=spec, count=count),)), sources=(source,), seconds=REQUESTS / rate,
            objective=objective,
            prices={spec.kind: placed.price_per_hour},
        ),
        seed,
    )  # fmt: skip
    return played.figures
