"""Each worker's report of itself, as metrics of the worker; and what is found of it: by probes, by its speed
beside that of its peers, and that it was ejected.
"""

from collections import Counter as Counts
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from penstock.clock import NS_PER_S
from penstock.policy.resilience.probes import ProbeAnswer
from penstock.protocol.worker import Stats
from penstock.protocol.worker_parts import DeviceReadings
from penstock.telemetry.instruments import Counter, Gauge, Instruments, MetricFamily


class Followed:
    """A counter that repeats others kept elsewhere, one or several: a value below the last one means that it
    was reset.
    """

    __slots__ = ("_counter", "_seen", "_unit")

    def __init__(self, counter: Counter, unit: int = 1) -> None:
        self._counter, self._unit = counter, unit
        self._seen: dict[str, int] = {}

    def follow(self, value: int, who: str = "") -> None:
        """The other one has this value now."""
        seen = self._seen.get(who, 0)
        self._seen[who] = value
        self._counter.inc((value - seen if value >= seen else value) / self._unit)

    def follow_all(self, values: Mapping[str, int]) -> None:
        """The same of several."""
        for who, value in values.items():
            self.follow(value, who)

    def keep(self, those: Collection[str]) -> None:
        """Forget all others."""
        for who in [who for who in self._seen if who not in those]:
            del self._seen[who]


class WorkerLabels(NamedTuple):
    """The labels of a worker: all of them from its own side, none from a client's."""

    engine: str
    identity: str
    """The version of what it computes (`ModelInfo.identity`)."""
    device: str


_PROCESS = (
    ("rss_bytes", "penstock_worker_rss_bytes"),
    ("cgroup_bytes", "penstock_worker_cgroup_memory_bytes"),
    ("cgroup_limit_bytes", "penstock_worker_cgroup_memory_limit_bytes"),
    ("load", "penstock_worker_load_ratio"),
)
_GPU = (
    ("util", "DCGM_FI_DEV_GPU_UTIL"),
    ("memory_util", "DCGM_FI_DEV_MEM_COPY_UTIL"),
    ("used_mib", "DCGM_FI_DEV_FB_USED"),
    ("free_mib", "DCGM_FI_DEV_FB_FREE"),
    ("power_w", "DCGM_FI_DEV_POWER_USAGE"),
    ("temperature_c", "DCGM_FI_DEV_GPU_TEMP"),
    ("sm_clock_mhz", "DCGM_FI_DEV_SM_CLOCK"),
    ("xid", "DCGM_FI_DEV_XID_ERRORS"),
)
"""The fields of `GpuReadings` and `DeviceReadings` with the gauges that show them."""


ANSWERED, FAILED = "answered", "failed"
"""How requests end at a worker."""


class DeviceMeters:
    """The readings of the devices of a model's workers."""

    def __init__(self, model: str, table: Instruments) -> None:
        self._model = model
        self._process = [(field, table.gauge(name)) for field, name in _PROCESS]
        self._gpu = [(field, table.gauge(name)) for field, name in _GPU]
        self._cpu = table.counter("penstock_worker_cpu_seconds_total")
        self._followed: dict[str, Followed] = {}
        self._shown: dict[tuple[str, ...], MetricFamily[Gauge]] = {}
        """Gauges of GPUs by worker, index and field."""

    def follow(self, worker: str, readings: DeviceReadings) -> None:
        """A worker's latest."""
        if worker not in self._followed:
            self._followed[worker] = Followed(self._cpu.labels(self._model, worker), 1000)
        self._followed[worker].follow(readings.cpu_ms)
        for field, gauge in self._process:
            gauge.labels(self._model, worker).set(getattr(readings, field))
        gpu = readings.gpu
        said = set[tuple[str, ...]]()
        for field, gauge in self._gpu if gpu is not None else ():
            if gpu is not None and (value := getattr(gpu, field)) is not None:
                gauge.labels(self._model, worker, str(gpu.index)).set(value)
                said.add((worker, str(gpu.index), field))
                self._shown[worker, str(gpu.index), field] = gauge
        self._hide([each for each in self._shown if each[0] == worker and each not in said])

    def forget(self, worker: str) -> None:
        """It is gone, and its series with it."""
        if self._followed.pop(worker, None) is None:
            return
        for metric in (self._cpu, *(gauge for _, gauge in self._process)):
            metric.remove(self._model, worker)
        self._hide([each for each in self._shown if each[0] == worker])

    def _hide(self, those: Iterable[tuple[str, ...]]) -> None:
        """A GPU does not tell them, or not any more: an old value would pass for its latest."""
        for worker, index, field in those:
            self._shown.pop((worker, index, field)).remove(self._model, worker, index)


class WorkerMeters:
    """The reports of a model's workers; series of workers that are gone go, too."""

    def __init__(self, model: str, table: Instruments) -> None:
        self._model = model
        self._gauges = [
            table.gauge(f"penstock_worker_{name}") for name in ("running", "waiting", "kv_usage_ratio")
        ]
        self._counters = {
            field: (table.counter(f"penstock_worker_{name}_total"), unit)
            for field, name, unit in (
                ("generated_tokens", "generated_tokens", 1),
                ("step_ns", "step_seconds", NS_PER_S),
                ("memory_ns", "memory_seconds", NS_PER_S),
            )
        }
        """By the field of `Stats`, with what one of the counter's unit is there."""
        self._devices = DeviceMeters(model, table)
        self._mbu, self._info = table.gauge("penstock_worker_mbu_ratio"), table.gauge("penstock_worker_info")
        self._requests = table.counter("penstock_worker_requests_total")
        self._prefill = table.counter("penstock_worker_prefill_seconds_total")
        self._decode = table.counter("penstock_worker_decode_seconds_total")
        self._served: dict[str, tuple[Counter, Counter, Counter, Counter]] = {}
        """Answered, failed, prefill and decode."""
        self._followed: dict[str, dict[str, Followed]] = {}
        self._facts: dict[str, WorkerLabels] = {}
        self._seen: dict[str, Stats] = {}
        """As of the last steps that are in `mbu`."""
        self.mbu: dict[str, float] = {}
        """Memory bandwidth utilisation of each worker's last steps."""

    def follow(self, by_worker: Mapping[str, Stats | None]) -> None:
        """Take over what the workers say; one that is not named any more is forgotten."""
        for worker in [each for each in self._followed if each not in by_worker]:
            self._forget(worker)
        for worker in [each for each in self._served if each not in by_worker]:
            self._forget_served(worker)
        for worker, stats in by_worker.items():
            labels = (self._model, worker)
            if worker not in self._followed:
                self._followed[worker] = {
                    field: Followed(counter.labels(*labels), unit)
                    for field, (counter, unit) in self._counters.items()
                }
            used = 0.0 if stats is None or not stats.blocks_total else stats.blocks_used / stats.blocks_total
            values = (stats.running if stats else 0, stats.waiting if stats else 0, used)
            for gauge, value in zip(self._gauges, values, strict=True):
                gauge.labels(*labels).set(value)
            if stats is not None:
                for field, counter in self._followed[worker].items():
                    counter.follow(getattr(stats, field))
                self._look_at_memory(worker, stats)
                if stats.readings is not None:
                    self._devices.follow(worker, stats.readings)

    def answered(self, worker: str, count: int, prefill_ns: int, decode_ns: int) -> None:
        """It gave so many answers, which took it these times together."""
        answered, _, prefill, decode = self._served.get(worker) or self._serves(worker)
        answered.inc(count)
        prefill.inc(prefill_ns / NS_PER_S)
        decode.inc(decode_ns / NS_PER_S)

    def failed(self, worker: str, count: int) -> None:
        """So many requests ended there with an error."""
        (self._served.get(worker) or self._serves(worker))[1].inc(count)

    def _serves(self, worker: str) -> tuple[Counter, Counter, Counter, Counter]:
        labels = self._model, worker
        self._served[worker] = found = (
            self._requests.labels(*labels, ANSWERED),
            self._requests.labels(*labels, FAILED),
            self._prefill.labels(*labels),
            self._decode.labels(*labels),
        )
        return found

    def tell(self, facts: Mapping[str, WorkerLabels]) -> None:
        """The labels of each worker."""
        for worker, new in facts.items():
            if self._facts.get(worker) != new:
                self._forget_facts(worker)
                self._facts[worker] = new
                self._info.labels(self._model, worker, *new).set(1)

    def _look_at_memory(self, worker: str, stats: Stats) -> None:
        before = self._seen.get(worker)
        is_newer = before is not None and stats.step_ns > before.step_ns
        if before is None or stats.step_ns < before.step_ns or is_newer:
            self._seen[worker] = stats
        if before is not None and is_newer and stats.memory_ns:
            used = (stats.memory_ns - before.memory_ns) / (stats.step_ns - before.step_ns)
            self.mbu[worker] = used
            self._mbu.labels(self._model, worker).set(used)

    def _forget(self, worker: str) -> None:
        del self._followed[worker]
        for metric in (*self._gauges, *(counter for counter, _ in self._counters.values())):
            metric.remove(self._model, worker)
        self._forget_facts(worker)
        self._devices.forget(worker)
        self._seen.pop(worker, None)
        if self.mbu.pop(worker, None) is not None:
            self._mbu.remove(self._model, worker)

    def _forget_served(self, worker: str) -> None:
        del self._served[worker]
        for outcome in (ANSWERED, FAILED):
            self._requests.remove(self._model, worker, outcome)
        for counter in (self._prefill, self._decode):
            counter.remove(self._model, worker)

    def _forget_facts(self, worker: str) -> None:
        if (old := self._facts.pop(worker, None)) is not None:
            self._info.remove(self._model, worker, *old)


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
