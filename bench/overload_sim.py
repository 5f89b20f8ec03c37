"""Overload on virtual time: the simulator (penstock/sim) with the gateway's own queue before engines whose
steps are modelled.

    python bench/overload_sim.py [--seed N] [--seconds S] [--json FILE]

Prints what a spike of one tenant does to the others, what overload does to goodput, how far apart backlogged
tenants are served, and what `FlowControl` costs per request beside a loop that only pops the same events from
a heap.

A step takes 20 ms and 15 us for every prompt token in it, whatever else runs; how prompts share steps is the
engine's own scheduler's business. Clients leave when no token came within their patience. Goodput is requests
per second that met both promises (TTFT and TPOT), also in output tokens per second.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from time import process_time_ns

from harness import command_line, write_result

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome, RequestFacts, Start, UsageRecord
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.tenant import Tenant
from penstock.policy.terms import QueueTerms
from penstock.schedule.fair_share import cost
from penstock.sim.scenarios.overload import drained_s, goodput_of, mixed
from penstock.sim.scenarios.setup import Knobs, play
from penstock.sim.traffic.prompts import RequestRecord, Segment, SimRequest
from penstock.sim.world.messages import Submission, WorkerMessage
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.worker import SimWorker
from penstock.sim.world.world import World
from penstock.types import RequestId, TenantId, Usage, WorkerId

STEP_NS = 20 * NS_PER_MS
PREFILL_NS = 15_000
ROUTE = "model"
QUEUE_ONLY = AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=())
"""Admission that turns nobody away: what is looked at here is the queue behind it."""


def world_of(
    requests: list[SimRequest],
    *,
    workers: int,
    slots: int,
    queue: QueueTerms | None = None,
    tenants: list[Tenant] | None = None,
) -> World:
    """A gateway and its workers, of `slots` rows each."""
    worker = SimWorkerSpec(
        step_time=LinearStepTime(fixed_ns=STEP_NS, row_ns=0, prefill_ns=PREFILL_NS, kv_ps=0),
        engine=EngineSettings(step_tokens=4096, max_running=slots, max_waiting=64),
        num_blocks=slots * 600,
    )
    spec = WorldSpec(
        config=Config(queue=queue or QueueTerms(), admission=QUEUE_ONLY),
        pools=(PoolSpec(worker=worker, count=workers),),
        tenants={tenant.id: tenant for tenant in tenants or ()},
    )
    return World(spec, sorted(requests, key=lambda request: request.at_ns))


# --- workloads ------------------------------------------------------------------------------------


def poisson(
    random: Random,
    tenant: str,
    per_s: float,
    seconds: float,
    *,
    prompt: int = 1000,
    output: int = 200,
    patience_s: float = 0,
) -> list[SimRequest]:
    """Open loop: arrivals do not wait for answers. Lengths vary by a factor of two either way."""
    requests: list[SimRequest] = []
    at_s = random.expovariate(per_s)
    while at_s < seconds:
        lengths = [max(1, int(mean * 2 ** random.uniform(-1, 1))) for mean in (prompt, output)]
        requests.append(
            SimRequest(
                id=f"{tenant}-{len(requests)}",
                at_ns=int(at_s * NS_PER_S),
                tenant=tenant,
                prompt=(Segment(random.getrandbits(59), lengths[0]),),
                output_tokens=lengths[1],
                patience_ns=int(patience_s * NS_PER_S),
            )
        )
        at_s += random.expovariate(per_s)
    return requests


def capacity_per_s(workers: int, slots: int, *, prompt: int = 1000, output: int = 200) -> float:
    """Requests per second that full workers finish, of mean lengths (2 to the uniform over -1..1 has mean
    1.082).
    """
    seconds = 1.082 * (prompt * PREFILL_NS + output * STEP_NS / slots) / NS_PER_S
    return workers / seconds


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ttft_p95(records: list[RequestRecord]) -> int:
    return percentile([record.ttft_ns for record in records if record.first_ns >= 0], 0.95)


# --- what is measured -----------------------------------------------------------------------------


def spike(
    seed: int, seconds: float, *, times: float = 20, workers: int = 4, slots: int = 64
) -> dict[str, float]:
    """Ten tenants at 5% of capacity each; one of them sends `times` as much.

    The others' TTFT beside what it was.
    """
    tenants = [f"t{i}" for i in range(10)]
    share = 0.05 * capacity_per_s(workers, slots)
    figures: dict[str, float] = {}
    for name, factor in (("solo", 1.0), ("spike", times)):
        random = Random(seed)
        requests = [
            request
            for tenant in tenants[1:]
            for request in poisson(random, tenant, share, seconds, patience_s=30)
        ]
        requests += poisson(random, tenants[0], share * factor, seconds, patience_s=30)
        records = world_of(requests, workers=workers, slots=slots).run().records
        others = [record for record in records if record.tenant != tenants[0]]
        figures[name] = ttft_p95(others) / NS_PER_S
        done = sum(record.outcome is Outcome.FINISHED for record in others)
        figures[f"{name}_others_done"] = done / len(others)
    figures["ratio"] = figures["spike"] / figures["solo"]
    return figures


def overload(seed: int, *, loads: tuple[float, ...] = (1, 2, 5, 20), retries: int = 3) -> dict[str, float]:
    """Goodput with default settings, at multiples of the knee: requests per second that met both promises,
    and their output tokens (sim/scenarios/overload.py); and how long after the load something still waited.
    """
    found: dict[str, float] = {}
    for times in loads:
        played = play(mixed(Knobs(load=times), retries=retries), seed)
        found[f"{times:g}x_rps"], found[f"{times:g}x_tps"] = goodput_of(played)
        found[f"{times:g}x_drained_s"] = drained_s(played)
    return found


class Shares:
    """Watches how far apart tenants are served while all of them wait."""

    def __init__(self, world: World, tenants: list[TenantId]) -> None:
        self._world, self._tenants = world, tenants
        self.gaps: list[float] = []
        world.watcher = self

    def asked(self, request: SimRequest) -> None:
        """See `Watcher`."""

    def ended(self, record: RequestRecord) -> None:
        """See `Watcher`."""

    def billed(self, record: UsageRecord) -> None:
        """See `Watcher`."""

    def submitted(self, worker_id: WorkerId, submission: Submission, model: str) -> None:
        """See `Watcher`."""

    def on_messages(self, worker: SimWorker, gateway: int, messages: Sequence[WorkerMessage]) -> None:
        """See `Watcher`."""

    def happened(self, num_events: int) -> None:
        """See `Watcher`."""
        model_queue = self._world.gateways[0].control.model_queue(ROUTE)
        if model_queue is None or not model_queue.queue.num_waiting:
            return
        band = next(band for band in model_queue.queue.bands if band.config.name == "default")
        lines = [band.line(tenant) for tenant in self._tenants]
        if all(line is not None and line.num_waiting for line in lines):
            served = [int(band.served(tenant)) for tenant in self._tenants]
            self.gaps.append(max(served) - min(served))


def fairness(seed: int, seconds: float, *, slots: int = 64) -> dict[str, float]:
    """One tenant with 8,000-token prompts, nine with 200-token ones, all backlogged: gap of served tokens
    beside the bound.
    """
    random, tenants = Random(seed), [TenantId(f"t{i}") for i in range(10)]
    requests = [
        request
        for i, tenant in enumerate(tenants)
        for request in poisson(random, tenant, 20 if i else 4, seconds, prompt=200 if i else 8000)
    ]
    world = world_of(requests, workers=2, slots=slots // 2, queue=QueueTerms(tenant_share=1.0))
    shares = Shares(world, tenants)
    world.run()
    largest = max(cost(each.prompt_tokens, 0, each.output_tokens) for each in requests) / 10
    return {
        "largest_gap": max(shares.gaps),
        "bound": 2 * largest,
        "ratio": max(shares.gaps) / (2 * largest),
    }


def host_time(seed: int, num_requests: int) -> dict[str, float]:
    """CPU microseconds per request through all of `FlowControl`, beside popping as many events from a
    heap.
    """
    random = Random(seed)
    tenants = [Tenant(id=TenantId(f"t{i}"), band="default" if i % 3 else "priority") for i in range(100)]
    control = FlowControl(QueueTerms())
    workers = 64
    for i in range(workers):
        control.set_worker(0, ROUTE, WorkerId(f"w{i}"), WorkerView(max_running=16))
    arrivals = [
        RequestFacts(
            id=RequestId(f"r{i}"),
            tenant=random.choice(tenants),
            route=ROUTE,
            prompt_tokens=500,
            max_tokens=200,
        )
        for i in range(num_requests)
    ]
    usage = Usage(prompt_tokens=500, completion_tokens=128)
    running: list[RequestId] = []
    began_ns = process_time_ns()
    for i, arrival in enumerate(arrivals):
        now_ns = i * 10_000
        control.arrive(now_ns, arrival)
        for answer in control.dispatch(now_ns):
            if isinstance(answer, Start):
                running.append(answer.id)
                control.first_output(now_ns, answer.id, cached_tokens=100)
                control.output(now_ns, answer.id, 64)
                control.output(now_ns, answer.id, 64)
        if len(running) > 1024:
            control.ended(now_ns, running.pop(0), Outcome.FINISHED, usage)
        control.next_ns(now_ns)
    spent_ns = process_time_ns() - began_ns
    heap: list[tuple[int, int, RequestFacts]] = []
    began_ns = process_time_ns()
    for i, arrival in enumerate(arrivals):
        for event in range(5):
            heappush(heap, (i * 10_000 + event, 5 * i + event, arrival))
        while len(heap) > 1024:
            heappop(heap)
    bare_ns = process_time_ns() - began_ns
    return {
        "us_per_request": spent_ns / num_requests / 1000,
        "bare_heap_us_per_request": bare_ns / num_requests / 1000,
        "ratio": spent_ns / bare_ns,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="of virtual time")
    args = parser.parse_args()
    figures = {
        "spike_4_workers": spike(args.seed, args.seconds),
        "spike_1_worker": spike(args.seed, args.seconds, workers=1),
        "goodput_by_load": overload(args.seed),
        "fairness": fairness(args.seed, min(args.seconds, 120)),
        "host_time": host_time(args.seed, 50_000),
    }
    write_result(args.json, {"seed": args.seed, "virtual_seconds": args.seconds, **figures})
    for name, values in figures.items():
        print(name)
        for key, value in values.items():
            print(f"  {key:28} {value:10.3f}")


if __name__ == "__main__":
    main()
