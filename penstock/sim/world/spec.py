"""What a simulated world is made of, beside its requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.clock import NS_PER_MS
from penstock.config.engine_settings import promised
from penstock.config.tree import Config
from penstock.policy.queueing.capacity import Placement
from penstock.policy.tenant import Tenant
from penstock.sim.world.worker import SimWorkerSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolSpec:
    """The workers of one model in one region."""

    model: str = "model"
    worker: SimWorkerSpec = field(default_factory=SimWorkerSpec)
    count: int = 4
    """Ready from the start."""
    schedule: tuple[tuple[int, int], ...] = ()
    """(time, count): how many there shall be from then on. New ones take their cold start, the newest leave
    first."""
    region: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class WorldSpec:
    """All that a run depends on, beside its requests."""

    seed: int = 0
    config: Config = field(default_factory=Config)
    """Queues, admission, limits, prices, as in the file that `penstock serve` reads."""
    pools: tuple[PoolSpec, ...] = (PoolSpec(),)
    gateways: int = 1
    """In every region."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict[str, Tenant])
    """By name; a request of any other tenant is one's with the defaults."""
    link_ns: int = NS_PER_MS // 2
    """One way between a gateway and a worker, and between a client and a gateway."""
    report_ns: int = 500 * NS_PER_MS
    """Time between two reports of a worker."""
    kv_kept: int = 0
    """KV events come over connections that keep them in order (0), or as a publisher's numbered messages,
    which may be lost and of which it keeps so many to send again (`KVEventChannel`)."""
    clock_skews_s: tuple[float, ...] = ()
    """How far the dates of the gateways are off, from the first on."""
    placement: Callable[[str], Placement] | None = None
    """Makes the placement of a model in place of the configured one, for comparisons; for worlds of one
    gateway."""
    until_ns: int = 0
    """When the run is cut off; 0: when everything has ended."""

    @property
    def tells_kv(self) -> bool:
        """Whether gateways want to hear what workers have in their KV caches."""
        return self.config.routing.placement.policy != "least_loaded"

    def worker_of(self, pool: PoolSpec) -> SimWorkerSpec:
        """A pool's workers, promised what the configuration promises."""
        return replace(pool.worker, engine=promised(pool.worker.engine, self.config.admission))
