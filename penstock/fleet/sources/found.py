"""From the endpoints that a source has found to the workers that there should be: the same for every kind of
source.

The workers that the configuration names: replicas to launch, and workers at addresses.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.backends.http.backend import BackendDependencies
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import Clock
from penstock.config.checkpoints import served_name
from penstock.config.engine_settings import EngineSettings, share_of
from penstock.config.fleet import DiscoverConfig, WorkerConfig, WorkerTraits
from penstock.config.tree import ModelConfig
from penstock.fleet.launchers.base import Launcher, WorkerSpec
from penstock.fleet.members import Attached, DesiredWorker, Launched, Members, worker_id_at
from penstock.telemetry.log import Log
from penstock.text.tokenizer import Tokenizer
from penstock.types import ModelName, WorkerId

TIMEOUT_S = 5.0
"""For one answer of DNS or of the API server."""
FOUND_MAX = 256
"""Workers taken from one source; more are reported and left out."""


@dataclass(slots=True, frozen=True, order=True)
class DiscoveredAddress:
    """Somebody listens there."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """As it stands in URLs; IPv6 addresses are bracketed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class DiscoveredWorkers:
    """What one source wants, kept in the registry by way of its members."""

    def __init__(
        self,
        source: str,
        config: DiscoverConfig,
        make: Callable[[WorkerConfig], DesiredWorker],
        members: Members,
        log: Log,
    ) -> None:
        """`make` says what a worker at an address is."""
        self.source, self.config = source, config
        self._make, self._members, self._log = make, members, log
        self._now: tuple[DiscoveredAddress, ...] | None = None
        self._left_out = 0

    async def take(self, endpoints: Iterable[DiscoveredAddress]) -> None:
        """These are there now, and no others. What is there no more drains."""
        every = sorted(set(endpoints))
        now = tuple(every[:FOUND_MAX])
        if (left_out := len(every) - len(now)) != self._left_out:
            self._left_out = left_out
            if left_out:
                self._log.warning(
                    "a source has more workers than are taken",
                    source=self.source,
                    taken=FOUND_MAX,
                    left_out=left_out,
                )
        if now == self._now:
            return
        before, self._now = set(self._now or ()), now
        self._log.info(
            "workers were found",
            source=self.source,
            joined=len(set(now) - before),
            left=len(before - set(now)),
        )
        await self._members.apply(self.source, [self._make(worker_at(each, self.config)) for each in now])


def worker_at(endpoint: DiscoveredAddress, config: DiscoverConfig) -> WorkerConfig:
    """The worker at an endpoint."""
    is_ours = config.engine == "penstock"
    return WorkerConfig(
        url=f"tcp:{endpoint.authority}" if is_ours else f"{config.scheme}://{endpoint.authority}",
        **{name: getattr(config, name) for name in WorkerTraits.__struct_fields__},
    )


def launched(
    model: ModelConfig,
    path: str,
    launcher: Launcher,
    tokenizer: Tokenizer,
    clock: Clock,
    *,
    heartbeat: HeartbeatTerms = HeartbeatTerms(),  # noqa: B008 - it is frozen.
    cores: int = 0,
) -> Iterator[Launched]:
    """The replicas of one model; `path` is its directory.

    They share `cores`; 0: each has those of its place.
    """
    name = served_name(model)
    for number in range(model.replicas):
        spec = WorkerSpec(
            worker_id=WorkerId(f"{name}-{number}"),
            model_path=path,
            model_name=ModelName(name),
            engine=EngineSettings.of(share_of(model.engine, model.replicas, cores)),
        )
        yield Launched(
            engine=model.engine,
            spec=spec,
            launcher=launcher,
            tokenizer=tokenizer,
            clock=clock,
            heartbeat=heartbeat,
        )


def attached(model: ModelConfig, tokenizer: Tokenizer, tools: BackendDependencies) -> Iterator[Attached]:
    """The workers of one model that run somewhere already."""
    name = served_name(model)
    for config in model.workers:
        yield Attached(
            id=worker_id_at(name, config), route=name, config=config, tokenizer=tokenizer, tools=tools
        )
