"""A run as data: drawn from a seed, checked, and made smaller until only what makes it fail is left.

Swarm testing (Groce et al., ISSTA 2012): every run draws first which kinds of faults may happen in it at all.
Runs with few kinds find what is hidden when everything fails at once.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from sim_checks import Checks, Recovery, Violation

from penstock import rng
from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.flow import QueueConfig, SharedConfig
from penstock.config.tree import Config
from penstock.planning.step_time import LinearStepTime
from penstock.policy.limits.rate_limit import RateTerms
from penstock.policy.resilience.health import HealthTerms
from penstock.policy.resilience.worker_state import BreakerTerms
from penstock.policy.tenant import Tenant
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.world.faults import Chaos, FaultKind, InjectedFault, clock_skews_s
from penstock.sim.world.run import PoolSpec, SimResult, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World
from penstock.types import TenantId

_BANDS = ("priority", "default", "default", "bulk")
_ADAPTERS = ("", "", "one", "two")
_COMMON = 99
"""A content that every tenant's prompts may begin with: that its cache is not shared is what the checks look
at."""
_MODEL = "model"
_Item = TypeVar("_Item")


_AMOUNTS: dict[FaultKind, tuple[float, float]] = {
    FaultKind.WORKER_SLOW: (2, 20),
    FaultKind.LATE: (20, 2000),
    FaultKind.STORE_LOSS: (0, 2),
    FaultKind.BAD_ROLLOUT: (0, 4),
    FaultKind.CLOCK_SKEW: (-3600, 3600),
}


def draw_faults(seed: int, *, until_ns: int, requests: int) -> tuple[InjectedFault, ...]:
    """The faults of one run, in order of time: each kind with even chance, then up to three of it.

    They begin in the first two thirds of the time until `until_ns`, and are over by then.
    """
    random, faults = rng.stream(seed, "sim/faults"), list[InjectedFault]()
    for kind in FaultKind:
        if random.random() < 0.5:
            continue
        low, high = _AMOUNTS.get(kind, (1.0, 1.0))
        for _ in range(random.randint(1, 3)):
            begin_ns = random.randrange(until_ns // 10, 2 * until_ns // 3)
            end_ns = begin_ns + random.randrange(1, until_ns - begin_ns)
            target = random.randrange(requests) if kind is FaultKind.POISON else random.randrange(1 << 16)
            faults.append(InjectedFault(kind, begin_ns, end_ns, target, round(random.uniform(low, high), 3)))
    return tuple(sorted(faults, key=lambda fault: (fault.at_ns, fault.kind, fault.target)))


class CaseShape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a world."""

    workers: int = 3
    gateways: int = 1
    regions: int = 1
    blocks: int = 400
    max_running: int = 8
    step_tokens: int = 256
    queue_max: int = 4096
    is_shared: bool = False
    """Gateways share their limits by a store."""
    tokens_per_minute: int = 0
    """Of every tenant; 0: no limit."""
    concurrent_max: int = 0
    """Requests of one tenant at once; 0: no limit."""
    kv_kept: int = 0
    """See `WorldSpec.kv_kept`."""
    hedge_after_ms: int = 0
    """When a request that says nothing is started on a second worker too; 0: never."""
    load_s: float = 16.0
    """Requests come for so long."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run, all of it: JSON of it is a reproducer."""

    seed: int
    shape: CaseShape = CaseShape()
    requests: tuple[SimRequest, ...]
    faults: tuple[InjectedFault, ...] = ()


def draw_case(seed: int) -> Case:
    """A small world, some seconds of mixed load, and faults in the first half of them: all from the seed."""
    random = rng.stream(seed, "sim/case")
    gateways = random.choice((1, 1, 2, 3))
    shape = CaseShape(
        workers=random.randint(1, 5),
        gateways=gateways,
        regions=random.choice((1, 1, 1, 2)),
        blocks=random.choice((150, 400, 1200)),
        max_running=random.choice((4, 8, 16)),
        step_tokens=random.choice((64, 256)),
        queue_max=random.choice((12, 100, 4096)),
        is_shared=random.random() < 0.5,
        tokens_per_minute=random.choice((0, 0, 20_000)),
        concurrent_max=random.choice((0, 0, 0, 6)),
        kv_kept=random.choice((0, 4, 500)),
        # Of a stream of its own: seeds drew the same cases before there were hedges.
        hedge_after_ms=rng.stream(seed, "sim/case/hedge").choice((0, 0, 60, 400)),
    )
    # From half of what the workers can do to twice that.
    per_s = 0.7 * shape.workers * shape.regions * shape.max_running**0.5 * 2 ** random.uniform(-1, 1)
    requests = _draw_requests(seed, shape, per_s)
    until_ns = int(shape.load_s * NS_PER_S)
    # Over by half the time, so that there is a while in which all must be well again.
    faults = draw_faults(seed, until_ns=until_ns // 2, requests=max(1, len(requests)))
    return Case(seed=seed, shape=shape, requests=requests, faults=faults)


def run_case(case: Case, *, every: int = 256) -> SimResult:
    """Run and check it.

    Raises:
        AssertionError: something that must hold does not: a check (`Violation`), or an assertion of the code
            under test.
    """
    world = World(_spec(case), case.requests)
    Chaos(world, case.faults)
    checks = Checks(world, every=every)
    result = world.run()
    checks.finish(result, _recovery(case))
    return result


def failure(case: Case) -> str:
    """Why a case fails, in one line; empty if it does not."""
    try:
        run_case(case, every=512)
    except AssertionError as error:
        kind = "" if isinstance(error, Violation) else "assertion: "
        return kind + (str(error).splitlines() or ["without words"])[0]
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a finding.
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(case: Case, fails: Callable[[Case], bool], *, runs_max: int = 300) -> Case:
    """The smallest case found that still fails: fewer faults, fewer requests, then shorter faults.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE
    2002).
    """
    left = [runs_max]

    def still_fails(tried: Case) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(tried)

    def with_faults(faults: Sequence[InjectedFault]) -> Case:
        return msgspec.structs.replace(case, faults=tuple(faults))

    def with_requests(requests: Sequence[SimRequest]) -> Case:
        return msgspec.structs.replace(case, requests=tuple(requests))

    case = with_faults(_minimal(case.faults, lambda faults: still_fails(with_faults(faults))))
    case = with_requests(_minimal(case.requests, lambda requests: still_fails(with_requests(requests))))
    case = with_faults(_minimal(case.faults, lambda faults: still_fails(with_faults(faults))))
    for index, fault in enumerate(case.faults):
        shorter = msgspec.structs.replace(
            fault, until_ns=fault.at_ns + (fault.until_ns - fault.at_ns) // 8 + 1
        )
        tried = with_faults((*case.faults[:index], shorter, *case.faults[index + 1 :]))
        case = tried if still_fails(tried) else case
    return case


def _minimal(items: Sequence[_Item], fails: Callable[[Sequence[_Item]], bool]) -> Sequence[_Item]:
    """ddmin: the items without parts that are not needed, in ever smaller parts."""
    parts = 2
    while items:
        size = -(-len(items) // parts)
        for start in range(0, len(items), size):
            rest = [*items[:start], *items[start + size :]]
            if fails(rest):
                items, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(items))
    return items


def _draw_requests(seed: int, shape: CaseShape, per_s: float) -> tuple[SimRequest, ...]:
    random, requests = rng.stream(seed, "sim/case/requests"), list[SimRequest]()
    room = shape.blocks * 16 // 3
    at_s = 0.0
    while (at_s := at_s + random.expovariate(per_s)) < shape.load_s:
        number, tenant = len(requests), random.randrange(5)
        at_ns, answer = int(at_s * NS_PER_S), random.randint(1, min(200, room))
        first = random.choice((1 + tenant, _COMMON))
        prompt = (Segment(first, 48), Segment(1000 + number, random.randint(1, min(800, room))))
        adapter = random.choice(_ADAPTERS)
        if requests and random.random() < 0.3:  # A next turn.
            before = requests[-1 - random.randrange(min(8, number))]
            prompt = (
                *before.prompt,
                Segment(before.answer, before.output_tokens),
                Segment(1000 + number, 20),
            )
            tenant, adapter = int(before.tenant[1:]), before.adapter
        if sum(segment.tokens for segment in prompt) > 2 * room:
            prompt = prompt[:1]
        requests.append(
            SimRequest(
                id=f"r{number}",
                at_ns=at_ns,
                tenant=f"t{tenant}",
                model=_MODEL,
                prompt=prompt,
                answer=1_000_000 + number,
                output_tokens=answer,
                max_tokens=random.choice((0, answer + 50, 250)),
                adapter=adapter,
                band=_BANDS[tenant % len(_BANDS)],
                region=f"region{random.randrange(shape.regions)}",
                public_tokens=random.choice((0, 32)),
                # Every client leaves at some time: a stream without any output would wait for ever.
                cancel_at_ns=at_ns + random.choice((1, 30, 60)) * NS_PER_S,
                patience_ns=random.choice((0, 5 * NS_PER_S)),
            )
        )
    return tuple(requests)


class _Health(HealthTerms, frozen=True, kw_only=True):
    """The constants of health, and one that hedging takes from here too (`extended` goes by name)."""

    hedge_after_ms: int = 0


def _spec(case: Case) -> WorldSpec:
    shape = case.shape
    engine = EngineSettings(step_tokens=shape.step_tokens, max_running=shape.max_running, max_waiting=64)
    worker = SimWorkerSpec(
        step_time=LinearStepTime(fixed_ns=5_000_000, row_ns=300_000, prefill_ns=100_000),
        engine=engine,
        num_blocks=shape.blocks,
        max_model_len=shape.blocks * 16,
        cold_start_ns=NS_PER_S,
    )
    config = Config(
        queue=QueueConfig(requests_max=shape.queue_max),
        limits=RateTerms(slice_tokens=32),
        # Open for at most 3 s, so that all of it happens in a case: `_recovery` allows 5 s.
        health=_Health(
            breaker=BreakerTerms(window_s=4, attempts_min=5, open_s=1, open_max_s=3),
            hedge_share=0.1 if shape.hedge_after_ms else 0.0,
            hedge_after_ms=shape.hedge_after_ms,
        ),
        shared=SharedConfig(url="redis://store") if shape.is_shared else SharedConfig(),
    )
    tenants = {
        f"t{number}": Tenant(
            id=TenantId(f"t{number}"),
            cache_salt=b"salt %d" % number,
            fairness_key=f"t{number}",
            weight=1.0 + number,
            tokens_per_minute=shape.tokens_per_minute,
            concurrent_max=shape.concurrent_max,
        )
        for number in range(5)
    }
    regions = [f"region{number}" for number in range(shape.regions)]
    return WorldSpec(
        seed=case.seed,
        config=config,
        pools=tuple(
            PoolSpec(model=_MODEL, worker=worker, count=shape.workers, region=region) for region in regions
        ),
        gateways=shape.gateways,
        tenants=tenants,
        report_ns=100 * NS_PER_MS,
        kv_kept=shape.kv_kept,
        clock_skews_s=clock_skews_s(case.faults, shape.gateways * shape.regions),
    )


def _recovery(case: Case) -> Recovery | None:
    """Latency is held against what it was only if something failed, late enough to know how it was before."""
    failing = [fault for fault in case.faults if fault.kind is not FaultKind.CLOCK_SKEW]
    if not failing:
        return None
    calm_ns = min(fault.at_ns for fault in failing)
    over_ns = max(fault.until_ns for fault in failing) + 5 * NS_PER_S

    def usual(since_ns: int) -> float:
        world = World(_spec(case), case.requests)
        checks = Checks(world, every=1 << 30)
        world.run()
        return checks.answered(since_ns)

    return Recovery(calm_ns=calm_ns, over_ns=over_ns, usual=usual)
