"""Scenes for the alerts: what the metrics do by the minute, and which alerts fire when.

Each is played before the server's own evaluation (test_alerts.py), and written down for promtool, which plays
it before Prometheus' (test_rules.py): both must agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.telemetry.alerts import BURNS, DUE, MISSED, Burn, duration

MODEL = {"model": "m"}
SERIES = {"model": "m", "band": "default"}
Expected = frozenset[tuple[str, str, str]]
"""Name, severity, burn."""


@dataclass(frozen=True)
class Scene:
    """`requests`: by objective, spans of (minutes, requests per minute, missed per minute). `gauges` and
    `counters`: by series, spans of (minutes, value) and of (minutes, growth per minute).
    """

    name: str
    requests: Mapping[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)
    gauges: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    counters: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    fires: Mapping[int, Expected] = field(default_factory=dict)
    """By minute, exactly those; with `only`, of that name and burn."""
    only: tuple[str, str] = ("", "")
    step: int = 1
    """Minutes between two samples."""


def alert(name: str, severity: str = "ticket", burn: str = "") -> Expected:
    return frozenset({(name, severity, burn)})


NONE: Expected = frozenset()
NAMES = {"availability": "AvailabilityBurn", "ttft": "TtftBurn", "tpot": "TpotBurn"}
TARGETS = {"availability": 0.995, "ttft": 0.95, "tpot": 0.95}
PER_MINUTE = 10_000


def burn_scene(objective: str, burn: Burn) -> Scene:
    """All is well for a long window; then a fifth more than the burn rate is missed, so it fires after five
    sixths of a long window; then all is well again, and it ends within a short window.
    """
    limit = burn.factor * (1 - TARGETS[objective])
    missed = min(PER_MINUTE, round(1.2 * limit * PER_MINUTE))
    long, short = burn.long_s // 60, burn.short_s // 60
    after = limit * long / (missed / PER_MINUTE)
    step = max(1, short // 60)
    margin = max(2 * step, round(0.02 * long))
    begin, name, factor = long + 2 * step, NAMES[objective], f"{burn.factor:g}"
    spans = [(begin, PER_MINUTE, 0), (2 * long, PER_MINUTE, missed), (2 * short, PER_MINUTE, 0)]
    fires = {
        _whole(begin + after - margin, step): NONE,
        _whole(begin + after + margin, step): alert(name, burn.severity, factor),
        _whole(begin + 2 * long, step): alert(name, burn.severity, factor),
        _whole(begin + 2 * long + short + 2 * step, step): NONE,
    }
    return Scene(
        f"{objective} {factor}", {objective: spans}, fires=fires, only=(name, factor), step=step
    )  # fmt: skip


def _whole(minute: float, step: int) -> int:
    return round(minute / step) * step


def burn_scenes() -> Iterator[Scene]:
    for objective, target in TARGETS.items():
        for burn in BURNS:
            if burn.factor * (1 - target) < 1:
                yield burn_scene(objective, burn)


READY, LOADING, WARMING, ASLEEP, WAKING = (
    f'penstock_workers{{model="m",state="{s}"}}' for s in ("ready", "loading", "warming", "asleep", "waking")
)
BUSY, STEPS = (f'penstock_engine_{each}_total{{model="m"}}' for each in ("step_seconds", "steps"))
WAITING, RUNNING = 'penstock_queue_waiting{model="m"}', 'penstock_engine_running{model="m"}'
RESTARTS = 'penstock_engine_restarts_total{model="m"}'
COST_BUSY, COST_IDLE = (
    f'penstock_accelerator_cost_total{{model="m",part="{each}"}}' for each in ("busy", "idle")
)
HELD, READ = (f'penstock_engine_kv_{each}_tokens_total{{model="m"}}' for each in ("held", "read"))
FLOOR = 'penstock_accelerator_floor_total{model="m"}'
PENDING, LOST = "penstock_ledger_pending_records", "penstock_ledger_lost_records_total"
DISK = "penstock_disk_free_ratio"
FAULTS = 'penstock_worker_faults_total{{model="m",kind="{}"}}'
WRONG, SLOW = (f'penstock_anomalous_workers{{model="m",cause="{each}"}}' for each in ("wrong", "slow"))


def workers(*spans: tuple[int, float]) -> dict[str, Sequence[tuple[int, float]]]:
    whole = sum(minutes for minutes, _ in spans)
    return {READY: spans} | {each: [(whole, 0)] for each in (LOADING, WARMING, ASLEEP, WAKING)}


SYMPTOMS = (
    Scene(
        "healthy",
        {each: [(90, 100, 0)] for each in (*TARGETS, "ttft_double")},
        gauges={
            **workers((90, 2)), WAITING: [(90, 1)], RUNNING: [(90, 5)],
            PENDING: [(90, 30)], DISK: [(90, 0.5)],
        },
        counters={BUSY: [(90, 72)], STEPS: [(90, 3000)], RESTARTS: [(90, 0)], LOST: [(90, 0)]},
        fires={30: NONE, 60: NONE, 90: NONE},
    ),
    Scene(
        "a blip of 2 % for three minutes",
        {"availability": [(400, 100, 0), (3, 100, 2), (60, 100, 0)]},
        fires=dict.fromkeys((401, 402, 403, 404, 410, 440, 460), NONE),
    ),
    Scene(
        "5 % errors and a bit: the 10x ticket and the 6x page, and not the page of 14.4",
        {"availability": [(1440, 1000, 0), (420, 1000, 51)]},
        fires={
            1440: NONE,
            1440 + 65: alert("AvailabilityBurn", "ticket", "10"),
            1440 + 400: frozenset(
                ("AvailabilityBurn", severity, burn)
                for severity, burn in (("page", "6"), ("ticket", "10"), ("ticket", "1"))
            ),
        },
    ),
    Scene(
        "three requests, all of them failed",
        {"availability": [(60, 0, 0), (3, 1, 1), (60, 0, 0)]},
        fires={63: NONE, 66: NONE},
    ),
    Scene(
        "2 % of first tokens take over twice the promise",
        {"ttft_double": [(20, 100, 0), (20, 100, 2), (20, 100, 0)]},
        fires={20: NONE, 30: alert("TtftFarOver", "page"), 40: alert("TtftFarOver", "page"), 50: NONE},
    ),
    Scene(
        "a worker's process ends",
        counters={RESTARTS: [(20, 0), (1, 1), (30, 0)]},
        fires={20: NONE, 23: alert("WorkerCrashed", "page"), 40: NONE},
    ),
    Scene(
        "a model is lost for five minutes",
        gauges=workers((20, 1), (5, 0), (20, 2)),
        fires={20: NONE, 22: NONE, 24: alert("NoWorkerReady", "page"), 30: NONE},
    ),
    Scene(
        "a model loads for ten minutes",
        gauges=workers((10, 0), (20, 1)) | {LOADING: [(10, 1), (20, 0)]},
        fires={9: NONE, 20: NONE},
    ),
    Scene(
        "a model sleeps for an hour, and takes a while to wake",
        gauges=workers((10, 1), (64, 0), (9, 1))
        | {ASLEEP: [(10, 0), (60, 1), (13, 0)], WAKING: [(70, 0), (4, 1), (9, 0)]},
        fires={30: NONE, 69: NONE, 73: NONE, 80: NONE},
    ),
    *(
        Scene(
            f"a fault: {kind}",
            counters={FAULTS.format(kind): [(20, 0), (1, 1), (30, 0)], FAULTS.format("xid_noted"): [(51, 1)]},
            fires={20: NONE, 23: alert(name, "page"), 40: NONE},
        )
        for kind, name in (("xid", "DeviceLost"), ("oom_kill", "OomKill"), ("weights", "WeightsDamaged"))
    ),
    Scene(
        "a worker answers wrongly",
        gauges={WRONG: [(10, 0), (5, 1), (10, 0)], SLOW: [(25, 0)]},
        fires={10: NONE, 12: alert("WorkerWrong", "page"), 20: NONE},
    ),
    Scene(
        "a worker is slow",
        gauges={SLOW: [(10, 0), (5, 1), (10, 0)], WRONG: [(25, 0)]},
        fires={10: NONE, 12: alert("WorkerSlow", "page"), 20: NONE},
    ),
    Scene(
        "a queue that stays",
        gauges={WAITING: [(10, 1), (20, 9), (10, 1)], RUNNING: [(40, 8)]},
        fires={10: NONE, 19: NONE, 22: alert("QueueSustained"), 35: NONE},
    ),
    Scene(
        "a queue that comes and goes",
        gauges={WAITING: [(10, 9), (2, 1), (9, 9), (20, 1)], RUNNING: [(41, 8)]},
        fires={9: NONE, 20: NONE, 30: NONE},
    ),
    Scene(
        "two workers with little to do",
        gauges=workers((90, 2)),
        counters={BUSY: [(40, 60), (40, 18), (10, 60)], STEPS: [(90, 100)]},
        fires={40: NONE, 52: NONE, 72: alert("UtilisationLow"), 90: NONE},
    ),
    Scene(
        "one worker with little to do",
        gauges=workers((60, 1)),
        counters={BUSY: [(60, 9)], STEPS: [(60, 100)]},
        fires={40: NONE, 60: NONE},
    ),
    Scene(
        "KV memory that fills with emptier blocks, hour by hour",
        counters={HELD: [(180, 1100), (60, 1800), (60, 1100)], READ: [(300, 1000)]},
        fires={180: NONE, 190: NONE, 218: alert("KvFragmentation"), 300: NONE},
    ),
    Scene(
        "KV memory of short requests as ever, and of longer ones",
        counters={HELD: [(180, 1800), (60, 1150), (60, 1400)], READ: [(300, 1000)]},
        fires={180: NONE, 240: NONE, 300: NONE},
    ),
    Scene(
        "workers without a free moment",
        gauges=workers((90, 2)),
        counters={BUSY: [(30, 60), (40, 118.8), (20, 60)], STEPS: [(90, 100)]},
        fires={30: NONE, 44: NONE, 65: alert("UtilisationHigh"), 90: NONE},
    ),
    Scene(
        "full workers, then a fleet that is half empty",
        counters={
            COST_BUSY: [(40, 0.03), (40, 0.02), (40, 0.03)],
            COST_IDLE: [(40, 0), (40, 0.02), (40, 0)],
            FLOOR: [(40, 0.02), (40, 0.012), (40, 0.02)],
        },
        fires={40: NONE, 58: NONE, 65: alert("CostOverFloor"), 80: alert("CostOverFloor"), 100: NONE},
    ),
    Scene(
        "the ledger's database is away",
        gauges={PENDING: [(10, 200), (20, 5000), (10, 0)]},
        fires={10: NONE, 19: NONE, 22: alert("LedgerLag"), 35: NONE},
    ),
    Scene(
        "records are lost",
        counters={LOST: [(20, 0), (2, 7), (20, 0)]},
        fires={20: NONE, 23: alert("LedgerLoss", "page"), 40: NONE},
    ),
    Scene(
        "the disk fills up",
        gauges={DISK: [(10, 0.3), (20, 0.08), (10, 0.2)]},
        fires={10: NONE, 14: NONE, 17: alert("DiskFull"), 35: NONE},
    ),
)  # fmt: skip


def all_scenes() -> Sequence[Scene]:
    return [*SYMPTOMS, *burn_scenes()]


def length(scene: Scene) -> int:
    return max(scene.fires)


def at(spans: Sequence[tuple[int, float]], minute: int) -> float:
    """The value of a gauge, or the growth of a counter in this minute."""
    for minutes, value in spans:
        if minute < minutes:
            return value
        minute -= minutes
    return spans[-1][1]


def grown(spans: Sequence[tuple[int, float]], minute: int) -> float:
    """What a counter is at the beginning of a minute."""
    total = 0.0
    for minutes, value in spans:
        total += value * min(minute, minutes)
        minute -= min(minute, minutes)
    return total


def promtool_test(scene: Scene) -> str:
    """One test of a file for `promtool test rules`."""
    series = dict[str, str]()
    for objective, spans in scene.requests.items():
        for name, column in ((DUE, 1), (MISSED, 2)):
            labels = f'{{model="m",band="default",objective="{objective}"}}'
            series[name + labels] = _counter([(span[0], span[column]) for span in spans], scene.step)
    for name, spans in scene.counters.items():
        series[name] = _counter(spans, scene.step)
    for name, spans in scene.gauges.items():
        series[name] = " ".join(f"{value:g}x{minutes - (i == 0)}" if i == 0 else f"{value:g}x{minutes - 1}"
                                for i, (minutes, value) in enumerate(_with_start(spans)))  # fmt: skip
    lines = [f"  - name: {scene.name!r}", f"    interval: {duration(scene.step * 60)}", "    input_series:"]
    lines += [f"      - series: '{name}'\n        values: '{values}'" for name, values in series.items()]
    lines.append("    promql_expr_test:")
    for minute, expected in scene.fires.items():
        lines.append(f"      - expr: {_asked(scene)!r}\n        eval_time: {minute}m")
        lines.append("        exp_samples:" if expected else "        exp_samples: []")
        for name, severity, burn in sorted(expected):
            labels = f'alertname="{name}", severity="{severity}"' + (f', burn="{burn}"' if burn else "")
            lines.append(f"          - labels: '{{{labels}}}'\n            value: 1")
    return "\n".join(lines) + "\n"


def _asked(scene: Scene) -> str:
    name, burn = scene.only
    chosen = f',alertname="{name}",burn="{burn}"' if name else ""
    return f'group by (alertname, severity, burn) (ALERTS{{alertstate="firing"{chosen}}})'


def _with_start(spans: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Samples are taken at the beginning and the end of everything."""
    (minutes, value), *rest = spans
    return [(minutes + 1, value), *rest]


def _counter(spans: Sequence[tuple[int, float]], step: int) -> str:
    found, total = list[str](), 0.0
    for i, (minutes, per_minute) in enumerate(spans):
        steps = round(minutes / step)
        first = total if i == 0 else total + per_minute * step
        found.append(f"{first:.10g}+{per_minute * step:.10g}x{steps if i == 0 else steps - 1}")
        total += per_minute * step * steps
    return " ".join(found)
