"""What the metrics page says of probes, of workers' speed beside that of their peers, and of ejections."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable

from prometheus_client import Counter, Gauge

from penstock.clock import NS_PER_S
from penstock.policy.resilience.probes import ProbeAnswer

Labels = tuple[str, str]
"""Model and worker."""
CAUSES = ("slow", "wrong")
FAULTS = ("xid", "xid_noted", "oom_kill", "weights")
"""The kinds of `protocol.worker.Fault`."""


class AnomalyMeters:
    """One for a gateway process."""

    def __init__(self, gauge: Callable[[str], Gauge], counter: Callable[[str], Counter]) -> None:
        """Both give the metric of a name in the catalog."""
        self._probes = counter("penstock_probes_total")
        self._ejections = counter("penstock_ejections_total")
        self._found = gauge("penstock_anomalous_workers")
        self._ttft = gauge("penstock_probe_ttft_seconds")
        self._tpot = gauge("penstock_probe_tpot_seconds")
        self._distance = gauge("penstock_probe_logprob_distance")
        self._slowness = gauge("penstock_worker_slowness_ratio")
        self._weight = gauge("penstock_worker_weight_ratio")
        self._faults = counter("penstock_worker_faults_total")
        self._models = set[str]()
        self._with_faults = set[str]()
        """Models whose faults count from 0, so that the first one is seen as growth."""
        self._known = set[Labels]()

    def probed(self, model: str, worker: str, verdict: str, answer: ProbeAnswer | None, apart: float) -> None:
        """A probe is over; `apart` is the distance of its answer from the golden one."""
        self._probes.labels(model, verdict if verdict in ("right", "wrong", "undecided") else "none").inc()
        if answer is not None:
            self._known.add((model, worker))
            self._ttft.labels(model, worker).set(answer.ttft_ns / NS_PER_S)
            self._tpot.labels(model, worker).set(answer.tpot_ns / NS_PER_S)
            self._distance.labels(model, worker).set(apart)

    def ejected(self, model: str, cause: str) -> None:
        """A worker is out."""
        self._ejections.labels(model, cause).inc()

    def fault(self, model: str, kind: str) -> None:
        """Something is wrong with a worker's machine (`protocol.worker.Fault`)."""
        self._faults.labels(model, kind).inc()

    def workers(self, found: Iterable[tuple[str, str, float | None, float]]) -> None:
        """Model, worker, slowness (None: not known) and weight of all of them; others are gone."""
        now = set[Labels]()
        for model, worker, slowness, weight in found:
            now.add((model, worker))
            if model not in self._with_faults:
                self._with_faults.add(model)
                for kind in FAULTS:
                    self._faults.labels(model, kind)
            self._weight.labels(model, worker).set(weight)
            self._slowness.labels(model, worker).set(1.0 if slowness is None else slowness)
        for labels in self._known - now:
            for metric in (self._ttft, self._tpot, self._distance, self._slowness, self._weight):
                metric.remove(*labels)
        self._known = now

    def certain(self, found: Iterable[tuple[str, str]]) -> None:
        """Model and cause of each worker that was found slow or wrong."""
        counts = Counts(found)
        self._models |= {model for model, _ in counts}
        for model in self._models:
            for cause in CAUSES:
                self._found.labels(model, cause).set(counts[model, cause])
