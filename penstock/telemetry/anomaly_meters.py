"""What the metrics page says of probes, of workers' speed beside that of their peers, and of ejections."""

from collections import Counter as Counts
from collections.abc import Iterable

from penstock.clock import NS_PER_S
from penstock.policy.resilience.probes import ProbeAnswer
from penstock.telemetry.instruments import Instruments

Labels = tuple[str, str]
"""Model and worker."""
CAUSES = ("slow", "wrong")
VERDICTS = ("right", "wrong", "undecided", "answered")
FAULTS = ("xid", "xid_noted", "oom_kill", "weights")
"""The kinds of `protocol.worker.Fault`."""


class AnomalyMeters:
    """One for a gateway process."""

    def __init__(self, table: Instruments) -> None:
        self._probes = table.counter("penstock_probes_total")
        self._ejections = table.counter("penstock_ejections_total")
        self._found = table.gauge("penstock_anomalous_workers")
        self._ttft = table.gauge("penstock_probe_ttft_seconds")
        self._tpot = table.gauge("penstock_probe_tpot_seconds")
        self._distance = table.gauge("penstock_probe_logprob_distance")
        self._slowness = table.gauge("penstock_worker_slowness_ratio")
        self._weight = table.gauge("penstock_worker_weight_ratio")
        self._faults = table.counter("penstock_worker_faults_total")
        self._models = set[str]()
        self._with_faults = set[str]()
        """Models whose faults count from 0, so that the first one is seen as growth."""
        self._known = set[Labels]()

    def probed(self, model: str, worker: str, verdict: str, answer: ProbeAnswer | None, apart: float) -> None:
        """A probe is over; `apart` is the distance of its answer from the golden one, if it is held against
        one.
        """
        self._probes.labels(model, verdict if verdict in VERDICTS else "none").inc()
        if answer is not None:
            self._known.add((model, worker))
            self._ttft.labels(model, worker).set(answer.ttft_ns / NS_PER_S)
            self._tpot.labels(model, worker).set(answer.tpot_ns / NS_PER_S)
            if verdict != "answered":
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
