"""Workers of real backends, probed on a clock of the test's."""

import io

from engine_stand_ins import until
from fleets import worker_of

from penstock.backends.base import Backend
from penstock.clock import NS_PER_S, ManualClock
from penstock.config.tree import LogConfig
from penstock.fleet.registry import Registry, Worker
from penstock.gateway.dispatch.prober import Prober, probed_as
from penstock.policy.resilience.anomalies import Anomalies
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.tokenizer import Tokenizer
from penstock.types import WorkerId

BEAT_S = 30


class Probed:
    """Workers that are probed on a clock of the test's, over real sockets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.clock, self.metrics = ManualClock(), Metrics(["m"], version="test")
        log = Log(LogConfig(), self.clock, stream=io.StringIO())
        self.registry = Registry(self.clock, log)
        self.anomalies = Anomalies(BEAT_S * NS_PER_S)
        self.prober = Prober(
            self.anomalies,
            self.registry,
            lambda _: tokenizer,
            name="g",
            meters=self.metrics.anomalies(),
            clock=self.clock,
            log=log,
        )

    def add(self, engine: str, backend: Backend) -> WorkerId:
        worker = worker_of(self.registry, "m", backend, len(list(self.registry)))
        worker.engine = engine
        self.registry.add(worker)
        self.watch(worker)
        return worker.id

    def watch(self, worker: Worker, *, ready: bool = True) -> None:
        identity, beats = probed_as(worker)
        self.anomalies.worker(
            self.clock.now_ns(), "m", worker.id, ready=ready, identity=identity, beats=beats
        )

    async def beat(self) -> None:
        """One beat, and the probes that it brings, to their end."""
        self.clock.advance(BEAT_S * NS_PER_S)
        for _ in range(3):  # A wrong answer is asked for again at once.
            self.prober.tick()
            await until(lambda: not self.prober._running, timeout_s=60)

    def verdict(self, worker: WorkerId) -> str:
        found = self.anomalies.get(worker)
        return "" if found is None else found.verdict
