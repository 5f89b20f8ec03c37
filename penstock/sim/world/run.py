"""One run of a simulated world: what it is made of (its workers: their speed, their engine's settings, their
memory) and depends on, beside its requests, and what it comes to (counters, what became of every request, and
one hash over all of it).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from penstock.clock import NS_PER_MS
from penstock.config.engine_settings import EngineSettings, promised
from penstock.config.tree import Config
from penstock.kv.hashing import Computation
from penstock.planning.step_time import LinearStepTime, StepTime
from penstock.policy.flow import Outcome, UsageRecord
from penstock.policy.queueing.capacity import Placement
from penstock.policy.tenant import Tenant
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.world.adapters import SimAdapterSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class SimWorkerSpec:
    """One kind of worker."""

    step_time: StepTime = field(default_factory=LinearStepTime)
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(step_tokens=2048, max_running=64))
    checkpoint: str = ""
    """The content of its model's directory, whatever the model is called."""
    dtype: str = "bf16"
    """Of its weights and its KV cache."""
    num_blocks: int = 8192
    """KV blocks of 16 tokens."""
    max_model_len: int = 32_768
    kind: str = ""
    """Name of the accelerator, for reports and prices."""
    cold_start_ns: int = 0
    """From being asked for to being ready."""
    is_external: bool = False
    """Gateways take it for a provider's: nothing is known of how it computes."""
    resumes: bool = True  # It returns token ids, so another worker can continue its streams.
    fast_forwards: bool = True
    """False does every step by itself: slower, and the same."""
    adapters: SimAdapterSpec | None = None  # None: whatever a request names is there.

    @property
    def identity(self) -> str:
        """Of what it computes, as a worker of ours makes it from its files and settings."""
        return Computation(
            checkpoint=self.checkpoint,
            tokenizer=self.checkpoint,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            quantization=self.engine.quantization,
            kernels=self.kind,
        ).identity


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
    watches_speed: bool = False
    """Gateways hold workers' speed against their peers' (policy/resilience/anomalies.py)."""
    until_ns: int = 0
    """When the run is cut off; 0: when everything has ended."""

    @property
    def tells_kv(self) -> bool:
        """Whether gateways want to hear what workers have in their KV caches."""
        return self.config.routing.placement.policy != "least_loaded"

    def worker_of(self, pool: PoolSpec) -> SimWorkerSpec:
        """A pool's workers, promised what the configuration promises."""
        return replace(pool.worker, engine=promised(pool.worker.engine, self.config.admission))


@dataclass(slots=True)
class RunCounters:
    """Counted over the whole run."""

    arrived: int = 0
    finished: int = 0
    failed: int = 0
    rejected: int = 0
    evicted: int = 0
    cancelled: int = 0
    ended: int = 0
    """All of these together."""
    records: int = 0
    """Lines of the ledger."""
    prompt_tokens: int = 0
    """By the ledger; likewise below."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_micros: int = 0
    retries: int = 0
    """Attempts beside the first ones."""
    migrations: int = 0
    """Of them, those that went on in the middle of an answer."""
    steps: int = 0
    """Of all workers."""
    busy_ns: int = 0
    """Time in steps, of all workers."""
    ready_ns: int = 0
    """Time that workers were there, ready or not."""
    preemptions: int = 0
    generated_tokens: int = 0
    """By the workers, those of attempts that failed too."""


@dataclass(slots=True, kw_only=True)
class SimResult:
    """One run."""

    seed: int
    digest: str
    """Over every record in the order of their ends, and the counters: equal runs have equal ones, on any
    machine."""
    counters: RunCounters
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    """In the order of their ends; empty if they were handed over."""
    virtual_ns: int = 0
    num_events: int = 0


class RunTally:
    """Counts and hashes what becomes of requests while they end."""

    __slots__ = ("_hash", "counters")

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self.counters = RunCounters()

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, or was refused."""
        counters = self.counters
        counters.ended += 1
        match record.outcome:
            case Outcome.FINISHED:
                counters.finished += 1
            case Outcome.FAILED:
                counters.failed += 1
            case Outcome.REJECTED:
                counters.rejected += 1
            case Outcome.EVICTED:
                counters.evicted += 1
            case Outcome.CANCELLED:
                counters.cancelled += 1
        counters.retries += max(0, record.attempts - 1)
        counters.migrations += record.migrations
        self._hash.update(
            f"{record.id}|{record.outcome.value}|{record.reason}|{record.first_ns}|{record.end_ns}|"
            f"{record.prompt_tokens}|{record.cached_tokens}|{record.completion_tokens}|"
            f"{record.worker}|{record.queue_ns}\n".encode()
        )

    def billed(self, record: UsageRecord) -> None:
        """One line of the ledger."""
        counters = self.counters
        counters.records += 1
        counters.prompt_tokens += record.prompt_tokens
        counters.cached_tokens += record.cached_tokens
        counters.completion_tokens += record.completion_tokens
        counters.cost_micros += record.cost_micros

    def digest(self) -> str:
        """Over all that was told, and the counters as they are now."""
        final = self._hash.copy()
        # Under the name that the class had first: digests on record outlive renames.
        counters = repr(self.counters).removeprefix(type(self.counters).__name__)
        final.update(f"Counters{counters}".encode())
        return final.hexdigest()
