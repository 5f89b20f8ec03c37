"""Gateway processes before one engine of ours share it fairly, whichever filled its slots first."""

from collections import Counter

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.flow import SharedConfig
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config, ServerConfig
from penstock.planning.step_time import LinearStepTime
from penstock.policy.terms import BandTerms, QueueTerms
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World

ROWS, BACKLOG = 8, 1200
LATE_NS, FROM_NS, UNTIL_NS = NS_PER_S, 3 * NS_PER_S, 13 * NS_PER_S
"""The second tenant begins to ask when the first one has all slots; then shares are counted."""


class Spread(World):
    """Clients stay with the process that took their connection, which their requests' names begin with."""

    def _ask(self, now_ns: int, request: SimRequest, number: int) -> None:
        super()._ask(now_ns, request, int(request.id.partition("-")[0]))


def backlog(asks_at: dict[str, tuple[int, ...]]) -> list[SimRequest]:
    """As much as anybody can be served, from each tenant at each of its processes."""
    made = [
        SimRequest(
            id=f"{process}-{tenant}-{number}",
            at_ns=number * 1000 + (LATE_NS if tenant == "late" else 0),
            tenant=tenant,
            prompt=(Segment(100_000 * process + 10_000 * len(tenant) + number, 50),),
            output_tokens=20 + number % 9,
        )
        for tenant, processes in asks_at.items()
        for process in processes
        for number in range(BACKLOG)
    ]
    return sorted(made, key=lambda request: (request.at_ns, request.id))


def served(num_processes: int, asks_at: dict[str, tuple[int, ...]]) -> Counter[str]:
    """The cost of what each tenant was served in the window."""
    band = BandTerms(name="default", order=0, requests_max=10**6, timeout_s=3600)
    config = Config(
        server=ServerConfig(processes=num_processes),
        shared=SharedConfig(url="redis://store", gateways=num_processes),
        queue=QueueTerms(requests_max=10**6, bands=(band,), tenant_share=1.0),
        admission=AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=()),
    )
    worker = SimWorkerSpec(
        step_time=LinearStepTime(fixed_ns=10 * NS_PER_MS, row_ns=0, prefill_ns=15_000, kv_ps=0),
        engine=EngineSettings(max_running=ROWS),
        num_blocks=ROWS * 100,
    )
    spec = WorldSpec(
        config=config, pools=(PoolSpec(worker=worker, count=1),), gateways=num_processes, until_ns=UNTIL_NS
    )
    found = Counter[str]()
    for record in Spread(spec, iter(backlog(asks_at))).run().records:
        if record.completion_tokens and record.end_ns > FROM_NS:
            found[record.tenant] += record.prompt_tokens + 2 * record.completion_tokens
    return found


@pytest.mark.parametrize(
    ("num_processes", "asks_at"),
    [
        (2, {"early": (0,), "late": (1,)}),
        (2, {"early": (0, 1), "late": (1,)}),
        (3, {"early": (0, 1), "late": (2,)}),
    ],
)
def test_the_engine_is_shared_evenly_whichever_process_a_tenant_asks(
    num_processes: int, asks_at: dict[str, tuple[int, ...]]
) -> None:
    found = served(num_processes, asks_at)
    assert found["late"] / found.total() == pytest.approx(0.5, rel=0.05)
