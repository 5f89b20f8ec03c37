"""What do a placement and an admission cost? Microseconds of CPU by workers, beside the least loaded's.

    python -m bench.policy.router_decision [--rounds 5] [--seconds 0.5] [--workers 64 1000] [--json FILE]

Prompts of 512 blocks, of which a few workers hold parts in the real prefix index; every start is booked, and
ended later, so that rooms and heap live. Prompt keys are made beforehand: hashing is paid once per prompt,
whoever places it. Times are process CPU: of a decision (look-up, scores, pick, record), and per request of
everything that goes with it (booking, predicting its blocks at the worker, learning at its end). An admission
is the gate's verdict with the promise, for a request of one of 100 tenants while two thirds of all rows run.
"""

from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from time import process_time_ns

from bench.harness import Spread, command_line, cpu_us, in_turns, ratios, rounds_table, write_result
from penstock.config.tree import Config
from penstock.kv.hashing import BlockHasher, PromptKeyMaker, PromptKeys
from penstock.kv.index.block_names import Stored
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.prefix_index import Tier
from penstock.kv.index.worker_cache_view import KVIndexLimits
from penstock.policy.contracts import ModelFacts, Pass
from penstock.policy.flow import Outcome, Queued, RequestFacts, Start
from penstock.policy.lifecycle.stack import build_policies
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.placement.pick import DecisionLog, LeastLoaded
from penstock.policy.placement.route import Router
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, Placement, WorkerCapacity, WorkerView
from penstock.policy.tenant import Tenant
from penstock.policy.terms import PlacementTerms, QueueTerms
from penstock.types import RequestId, TenantId, Usage, WorkerId

KEY, IDENTITY = b"bench/router_decision", "bench"
BLOCKS = 512
STREAMS = 8
"""Requests per worker that run at any time."""
VIEW = WorkerView(max_running=64, kv_blocks_total=65_536, kv_blocks_used=20_000)


class FixedKeys(PromptKeys):
    """Keys that were made beforehand."""

    __slots__ = ("_made",)

    def __init__(self, maker: PromptKeyMaker, own: list[int]) -> None:
        super().__init__(maker, range(16 * len(own)))
        self._made = own

    def own(self, hasher: BlockHasher) -> Sequence[int]:
        """See `PromptKeys`."""
        return self._made


class Rig:
    """Workers with their rooms and what they have cached, under one placement."""

    def __init__(
        self, placement: Placement, workers: CapacityTable, prompts: list[FixedKeys], seed: int
    ) -> None:
        self.placement, self.workers, self._prompts = placement, workers, prompts
        self._random, self._running = Random(seed), list[tuple[Work, WorkerCapacity]]()
        self._next = 0
        self.decisions: list[int] = []

    def decide(self, now_ns: int, running_max: int) -> None:
        """Place one request, after the oldest has ended if enough run."""
        self._next += 1
        keys = self._prompts[self._next % len(self._prompts)]
        if len(self._running) >= running_max:
            work, worker = self._running.pop(self._random.randrange(len(self._running)))
            self.workers.begin(worker, work)
            self.placement.began(now_ns, work, worker)
            self.workers.release(worker, work)
            usage = Usage(completion_tokens=100, prefill_ns=40_000_000, decode_ns=3_000_000_000)
            self.placement.ended(now_ns, work, worker, usage)
        work = Work(
            id=RequestId(f"r{self._next}"), band="default", tenant=TenantId("t"), arrived_ns=now_ns,
            prompt_tokens=BLOCKS * 16, output_tokens=200, blocks=BLOCKS, keys=keys,
            session=f"s{self._next % 500}",
        )  # fmt: skip
        began = process_time_ns()
        worker = self.placement.place(now_ns, work, self.workers, (), ())
        self.decisions.append(process_time_ns() - began)
        assert isinstance(worker, WorkerCapacity)
        self.workers.book(worker, work)
        self.placement.started(now_ns, work, worker)
        self._running.append((work, worker))


def prompts_of(maker: PromptKeyMaker, count: int, seed: int) -> list[FixedKeys]:
    """Conversations of 512 blocks; those of one group share the first 64."""
    random, groups = Random(seed), [[Random(g).getrandbits(63) for _ in range(64)] for g in range(16)]
    return [
        FixedKeys(maker, [*groups[i % 16], *(random.getrandbits(63) for _ in range(BLOCKS - 64))])
        for i in range(count)
    ]


def rig(policy: str, num_workers: int, seed: int) -> Rig:
    """One router, or least-loaded."""
    locality, workers = KVLocality(KVIndexLimits(), KEY), CapacityTable(QueueTerms())
    prompts = prompts_of(locality.maker("m"), 2 * num_workers, seed)
    for i in range(num_workers):
        worker = WorkerId(f"w{i}")
        workers.set(worker, VIEW)
        cache_view = locality.add(worker, model="m", is_own=True)
        locality.identify(worker, IDENTITY)
        for keys in prompts[2 * i : 2 * i + 2]:
            cache_view.hear([Stored(cache_view.names.keys_of(keys), None, b"", 16, Tier.DEVICE)])
    if policy == "least_loaded":
        return Rig(LeastLoaded(), workers, prompts, seed)
    terms, log = PlacementTerms(policy=policy), DecisionLog(kept_max=1024)
    router = Router("m", terms, Random(seed).randrange, locality=locality, log=log)
    return Rig(router, workers, prompts, seed)


Figures = dict[str, float]
"""Microseconds of CPU."""
BATCH = 200


def for_seconds(seconds: float, batch: Callable[[], None]) -> float:
    """The median of so many seconds of batches, for each of one."""
    costs: list[float] = []
    until_ns = process_time_ns() + int(seconds * 1e9)
    while process_time_ns() < until_ns:
        costs.append(cpu_us(batch, BATCH))
    return median(costs)


def placing(policy: str, num_workers: int, seconds: float) -> Callable[[], Figures]:
    """Medians of a decision, and of all that a request costs the placement; over `seconds` of CPU a call."""
    each, running_max, now_ns = rig(policy, num_workers, 7), STREAMS * num_workers, 0

    def place(num: int = BATCH) -> None:
        nonlocal now_ns
        for _ in range(num):
            now_ns += 1_000_000
            each.decide(now_ns, running_max)

    place(running_max + 500)

    def measured() -> Figures:
        each.decisions.clear()
        request = for_seconds(seconds, place)
        return {"request": request, "decision": median(each.decisions) / 1000}

    return measured


def admitting(num_workers: int, seconds: float) -> Callable[[], Figures]:
    """Median of a verdict."""
    config, tenants = Config(), [Tenant(id=TenantId(f"t{i}")) for i in range(100)]
    stack = build_policies(
        config, facts=lambda _: ModelFacts(max_model_len=32_768), placement=lambda _: LeastLoaded(),
        limiter=Limiter(config.limits), wall_offset_ns=0, random=Random(7).random, on_hedge=lambda _: None,
    )  # fmt: skip
    control, now_ns = stack.control, 0
    for i in range(num_workers):
        control.set_worker(0, "m", WorkerId(f"w{i}"), VIEW)

    def facts(number: int) -> RequestFacts:
        name, tenant = RequestId(f"r{number}"), tenants[number % 100]
        return RequestFacts(id=name, tenant=tenant, route="m", prompt_tokens=1000, max_tokens=200)

    for number in range(num_workers * 43 + 200):
        now_ns += 1_000_000
        assert isinstance(control.arrive(now_ns, facts(number)), Queued)
        for start in control.dispatch(now_ns):
            assert isinstance(start, Start)
            control.first_output(now_ns + 50_000_000, start.id)
            if number < 200:
                control.ended(now_ns + 60_000_000, start.id, Outcome.FINISHED)
    model_queue = control.model_queue("m")
    assert model_queue is not None
    asked = [facts((1 << 20) + i) for i in range(BATCH)]

    def admit() -> None:
        for request in asked:
            look = lambda _, request=request: model_queue.load(now_ns, request)
            assert isinstance(stack.admission.decide(now_ns, request, look), Pass)

    return lambda: {"decision": for_seconds(seconds, admit)}


def measure_all(rounds: int, seconds: float, workers: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """By number of workers and what is decided: each round's figures, of all that placing at the least loaded
    costs a request first.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for num_workers in workers:
        kinds = {name: placing(name, num_workers, seconds) for name in ("least_loaded", "ttft", "weighted")}
        kinds["admission"] = admitting(num_workers, seconds)
        found[f"{num_workers} workers"] = {
            f"{name}, a {figure}": [row[figure] for row in each]
            for name, each in in_turns(rounds, kinds).items()
            for figure in each[0]
        }
    return found


def measure(rounds: int) -> dict[str, Spread]:
    """For bench/ratchet.py: ratios to all that placing at the least loaded costs a request."""
    over = ratios(measure_all(rounds, 0.3, (64,)))
    return {name: over[f"64 workers, {name}, a decision"] for name in ("ttft", "admission")}


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of CPU for each figure of a round")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 64, 1000])
    args = parser.parse_args()
    found = measure_all(args.rounds, args.seconds, args.workers)
    print(rounds_table("", "us of CPU", found))
    write_result(args.json, {"cpu_us": found})


if __name__ == "__main__":
    main()
