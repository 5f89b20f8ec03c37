"""Overload on virtual time: the gateway's own queue and flow control before workers that are only modelled.

    python bench/overload_sim.py [--json] [--seed N] [--seconds S]

Prints what a spike of one tenant does to the others, what overload does to goodput, how far apart backlogged tenants are
served, and what `FlowControl` costs per request beside a loop that only pops the same events from a heap.

The model of a worker: `slots` streams at once; a prompt takes its tokens over `PREFILL_RATE`, then every token
takes `TOKEN_NS`; what it is given beyond its slots waits there, in the order of tenants' served tokens, as in our engine.
Clients leave when no token came within their patience. Good is what was answered to clients that were still there.
"""

import argparse
import json
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from penstock.clock import NS_PER_MS, NS_PER_S, SystemClock
from penstock.config.flow import QueueConfig
from penstock.policy.answers import Abort, Evict, Queued, Start
from penstock.policy.band import cost
from penstock.policy.control import FlowControl
from penstock.policy.flow import Arrival
from penstock.policy.parts import Parts
from penstock.policy.record import Outcome
from penstock.policy.room import WorkerView
from penstock.policy.tenant import Tenant
from penstock.types import RequestId, TenantId, Usage, WorkerId

PREFILL_RATE = 4000
"""Prompt tokens per second."""
TOKEN_NS = 20 * NS_PER_MS
SLICE = 64
"""Output tokens between two reports."""
ROUTE = "m"


@dataclass(slots=True)
class Job:
    """One request of the workload."""

    id: RequestId
    tenant: Tenant
    at_ns: int
    prompt: int
    output: int
    first_ns: int = -1
    done: bool = False
    gone: bool = False


@dataclass(slots=True)
class Worker:
    """A modelled worker: what runs, and what waits there by tenant's served tokens."""

    id: WorkerId
    slots: int
    running: int = 0
    waiting: list[tuple[int, Job]] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)

    def next(self) -> Job:
        """The first of the tenant that was served least."""
        best = min(self.waiting, key=lambda entry: (self.served.get(entry[1].tenant.id, 0), entry[0]))
        self.waiting.remove(best)
        return best[1]


class Simulation:
    """Jobs in, their fates out. Same jobs, same fates."""

    def __init__(
        self,
        jobs: list[Job],
        *,
        workers: int,
        slots: int,
        patience_s: float,
        queue: QueueConfig,
        parts: Parts | None = None,
    ) -> None:
        self.control = FlowControl(queue, parts)
        self.workers = {WorkerId(f"w{i}"): Worker(WorkerId(f"w{i}"), slots) for i in range(workers)}
        for worker in self.workers.values():
            self.control.set_worker(0, ROUTE, worker.id, WorkerView(max_running=slots))
        self.jobs = {job.id: job for job in jobs}
        self.where: dict[RequestId, Worker] = {}
        self.patience_ns = int(patience_s * NS_PER_S)
        self.events: list[tuple[int, int, str, Job | None]] = []
        self.count = self.settled = self.accepted = 0
        self.alarm_ns: int | None = None
        for job in jobs:
            self.at(job.at_ns, "arrive", job)

    def at(self, when_ns: int, kind: str, job: Job | None) -> None:
        self.count += 1
        heappush(self.events, (when_ns, self.count, kind, job))

    def run(self) -> None:
        """Until everything has ended."""
        while self.events:
            now_ns, _, kind, job = heappop(self.events)
            if kind == "alarm":
                self.alarm_ns = None
            elif job is not None and not job.gone:
                getattr(self, "on_" + kind)(now_ns, job)
            self.dispatch(now_ns)
        assert self.settled == self.accepted, "every accepted request settles once"
        assert not len(self.control)

    def dispatch(self, now_ns: int) -> None:
        for answer in self.control.dispatch(now_ns):
            if isinstance(answer, Start):
                worker = self.where[answer.id] = self.workers[answer.worker_id]
                self.count += 1
                worker.waiting.append((self.count, self.jobs[answer.id]))
                self.fill(now_ns, worker)
            elif isinstance(answer, Evict) and answer.settled is not None:
                self.settled += 1
                self.jobs[answer.id].gone = True
        due_ns = self.control.next_ns(now_ns)
        if due_ns is not None and (self.alarm_ns is None or due_ns < self.alarm_ns):
            self.alarm_ns = due_ns
            self.at(due_ns, "alarm", None)

    def fill(self, now_ns: int, worker: Worker) -> None:
        while worker.waiting and worker.running < worker.slots:
            job = worker.next()
            worker.running += 1
            tenant = job.tenant.id
            worker.served[tenant] = worker.served.get(tenant, 0) + cost(job.prompt, 0, job.output)
            self.at(now_ns + job.prompt * NS_PER_S // PREFILL_RATE, "first", job)

    def on_arrive(self, now_ns: int, job: Job) -> None:
        arrival = Arrival(
            id=job.id,
            tenant=job.tenant,
            route=ROUTE,
            prompt_tokens=job.prompt,
            max_tokens=job.output,
            num_bytes=4 * job.prompt,
        )
        if isinstance(self.control.arrive(now_ns, arrival), Queued):
            self.accepted += 1
            self.at(now_ns + self.patience_ns, "patience", job)
        else:
            job.gone = True

    def on_patience(self, now_ns: int, job: Job) -> None:
        if job.first_ns >= 0:
            return
        answer = self.control.cancel(now_ns, job.id)
        if isinstance(answer, Abort):
            worker = self.where[job.id]
            before = len(worker.waiting)
            worker.waiting = [entry for entry in worker.waiting if entry[1] is not job]
            worker.running -= len(worker.waiting) == before
            self.control.ended(now_ns, job.id, Outcome.CANCELLED)
            self.fill(now_ns, worker)
        self.settled += 1
        job.gone = True

    def on_first(self, now_ns: int, job: Job) -> None:
        job.first_ns = now_ns
        self.control.first_output(now_ns, job.id, cached_tokens=0)
        for tokens in range(SLICE, job.output, SLICE):
            self.at(now_ns + tokens * TOKEN_NS, "slice", job)
        self.at(now_ns + job.output * TOKEN_NS, "end", job)

    def on_slice(self, now_ns: int, job: Job) -> None:
        self.control.output(now_ns, job.id, SLICE)

    def on_end(self, now_ns: int, job: Job) -> None:
        worker = self.where.pop(job.id)
        worker.running -= 1
        job.done = True
        usage = Usage(prompt_tokens=job.prompt, completion_tokens=job.output)
        self.settled += (
            self.control.ended(now_ns, job.id, Outcome.FINISHED, usage, finish_reason="stop") is not None
        )
        self.fill(now_ns, worker)


# --- workloads ------------------------------------------------------------------------------------


def poisson(
    random: Random, tenant: Tenant, per_s: float, seconds: float, *, prompt: int = 1000, output: int = 200
) -> list[Job]:
    """Open loop: arrivals do not wait for answers. Lengths vary by a factor of two either way."""
    jobs: list[Job] = []
    at_s = random.expovariate(per_s)
    while at_s < seconds:
        name = RequestId(f"{tenant.id}-{len(jobs)}")
        length = [max(1, int(mean * 2 ** random.uniform(-1, 1))) for mean in (prompt, output)]
        jobs.append(Job(name, tenant, int(at_s * NS_PER_S), *length))
        at_s += random.expovariate(per_s)
    return jobs


def capacity_per_s(slots: int, *, prompt: int = 1000, output: int = 200) -> float:
    """Requests per second that the slots can finish, of mean lengths (2 to the uniform over -1..1 has mean 1.082)."""
    seconds = 1.082 * (prompt / PREFILL_RATE + output * TOKEN_NS / NS_PER_S)
    return slots / seconds


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ttft_p95(jobs: list[Job]) -> int:
    return percentile([job.first_ns - job.at_ns for job in jobs if job.first_ns >= 0], 0.95)


# --- what is measured -----------------------------------------------------------------------------


def spike(
    seed: int, seconds: float, *, times: float = 20, workers: int = 4, slots: int = 64
) -> dict[str, float]:
    """Ten tenants at 5% of capacity each; one of them sends `times` as much. The others' TTFT beside what it was."""
    tenants = [Tenant(id=TenantId(f"t{i}")) for i in range(10)]
    share = 0.05 * capacity_per_s(workers * slots)
    figures: dict[str, float] = {}
    for name, factor in (("solo", 1.0), ("spike", times)):
        random = Random(seed)
        others = [job for tenant in tenants[1:] for job in poisson(random, tenant, share, seconds)]
        jobs = others + poisson(random, tenants[0], share * factor, seconds)
        Simulation(jobs, workers=workers, slots=slots, patience_s=30, queue=QueueConfig()).run()
        figures[name] = ttft_p95(others) / NS_PER_S
        figures[f"{name}_others_done"] = sum(job.done for job in others) / len(others)
    figures["ratio"] = figures["spike"] / figures["solo"]
    return figures


def overload(
    seed: int, seconds: float, *, slots: int = 64, loads: tuple[float, ...] = (0.8, 1, 2, 5, 20)
) -> dict[str, float]:
    """Tokens per second answered in time, at multiples of capacity, as a share of the best of them."""
    tenants = [Tenant(id=TenantId(f"t{i}")) for i in range(4)]
    good: dict[str, float] = {}
    for times in loads:
        random = Random(seed)
        share = times * capacity_per_s(slots) / len(tenants)
        jobs = [job for tenant in tenants for job in poisson(random, tenant, share, seconds)]
        simulation = Simulation(jobs, workers=1, slots=slots, patience_s=70, queue=QueueConfig())
        simulation.run()
        good[f"{times:g}x"] = sum(job.output for job in jobs if job.done and job.at_ns < seconds * NS_PER_S)
        last_ns = max(job.first_ns + job.output * TOKEN_NS for job in jobs if job.done)
        good[f"{times:g}x"] /= last_ns / NS_PER_S
    peak = max(good.values())
    return {times: value / peak for times, value in good.items()}


def fairness(seed: int, seconds: float, *, slots: int = 64) -> dict[str, float]:
    """One tenant with 8,000-token prompts, nine with 200-token ones, all backlogged: gap of served tokens beside the bound."""
    random, tenants = Random(seed), [Tenant(id=TenantId(f"t{i}")) for i in range(10)]
    jobs = [
        job
        for i, tenant in enumerate(tenants)
        for job in poisson(random, tenant, 20 if i else 4, seconds, prompt=200 if i else 8000)
    ]
    simulation = Simulation(
        jobs, workers=2, slots=slots // 2, patience_s=1000, queue=QueueConfig(tenant_share=1.0)
    )
    served: dict[str, int] = {tenant.id: 0 for tenant in tenants}
    gaps: list[float] = []
    lane_of = simulation.control.lane

    def watch(now_ns: int) -> None:
        lane = lane_of(ROUTE)
        assert lane is not None
        band = next(band for band in lane.queue.bands if band.config.name == "default")
        lines = [band.line(tenant.id) for tenant in tenants]
        if all(line is not None and line.num_waiting for line in lines):
            served.update({tenant.id: int(band.served(tenant.id)) for tenant in tenants})
            gaps.append(max(served.values()) - min(served.values()))

    dispatch = simulation.dispatch

    def watched(now_ns: int) -> None:
        dispatch(now_ns)
        watch(now_ns)

    simulation.dispatch = watched
    simulation.run()
    largest = max(cost(job.prompt, 0, job.output) for job in jobs) / 10
    return {"largest_gap": max(gaps), "bound": 2 * largest, "ratio": max(gaps) / (2 * largest)}


def host_time(seed: int, num_requests: int) -> dict[str, float]:
    """Microseconds of one core per request through all of `FlowControl`, beside popping as many events from a heap."""
    clock, random = SystemClock(), Random(seed)
    tenants = [Tenant(id=TenantId(f"t{i}"), band="default" if i % 3 else "priority") for i in range(100)]
    control = FlowControl(QueueConfig())
    workers = 64
    for i in range(workers):
        control.set_worker(0, ROUTE, WorkerId(f"w{i}"), WorkerView(max_running=16))
    arrivals = [
        Arrival(
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
    began_ns = clock.now_ns()
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
    spent_ns = clock.now_ns() - began_ns
    heap: list[tuple[int, int, Arrival]] = []
    began_ns = clock.now_ns()
    for i, arrival in enumerate(arrivals):
        for event in range(5):
            heappush(heap, (i * 10_000 + event, 5 * i + event, arrival))
        while len(heap) > 1024:
            heappop(heap)
    bare_ns = clock.now_ns() - began_ns
    return {
        "us_per_request": spent_ns / num_requests / 1000,
        "bare_heap_us_per_request": bare_ns / num_requests / 1000,
        "ratio": spent_ns / bare_ns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="of virtual time")
    args = parser.parse_args()
    figures = {
        "spike_4_workers": spike(args.seed, args.seconds),
        "spike_1_worker": spike(args.seed, args.seconds, workers=1),
        "goodput_by_load": overload(args.seed, args.seconds),
        "fairness": fairness(args.seed, min(args.seconds, 120)),
        "host_time": host_time(args.seed, 50_000),
    }
    if args.json:
        print(json.dumps(figures, indent=2))
        return
    for name, values in figures.items():
        print(name)
        for key, value in values.items():
            print(f"  {key:28} {value:10.3f}")


if __name__ == "__main__":
    main()
