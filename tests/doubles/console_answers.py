"""What the gateway's endpoints for admins answer of the drawn fleet (`console_replay.py`)."""

import math
from random import Random

import msgspec

from penstock.config.tree import SloConfig
from penstock.fleet.rollouts import RolloutReport
from penstock.fleet.scale_report import ScaleReports
from penstock.policy.rollout.evidence import Reading
from penstock.telemetry.alerts import rules

TENANTS = ("acme", "globex", "initech", "umbrella")
DAYS = ("2026-11-18", "2026-11-17")
NOW_MS = 1_795_000_000_000
EXPECTED = "15100 tokens/s are expected in 55 s, give or take 900"
METRICS = (
    ("time per token", 0.05), ("prefill per uncached token", 0.1), ("length of answers", 0.2),
    ("answers cut off", 0.05), ("failures", 0.002),
)  # fmt: skip


def series(random: Random, num: int, model: str, band: str, load: float) -> dict:
    """One series of a history."""
    swing = [1 + 0.5 * math.sin(i / num * 9 + load) + random.uniform(-0.15, 0.15) for i in range(num)]
    requests = [round(load * each) for each in swing]
    shed = [round(max(0, each - 1.4) * load / 3) for each in swing]
    error = [int(random.random() < 0.03) for _ in range(num)]
    limited = [int(random.random() < 0.06) for _ in range(num)]
    stop = [a - b - c - d for a, b, c, d in zip(requests, shed, error, limited, strict=True)]
    queue = [round(18 * each**3, 1) for each in swing]
    prefill = [round(70 * (0.8 + 0.2 * each) + random.uniform(-4, 4), 1) for each in swing]
    ttft = [a + b for a, b in zip(queue, prefill, strict=True)]
    return {
        "model": model,
        "band": band,
        "requests": requests,
        "outcomes": {"stop": stop, "shed": shed, "error": error, "limited": limited},
        "prompt_tokens": [each * 820 for each in requests],
        "cached_tokens": [each * 512 for each in requests],
        "generated_tokens": [each * 190 for each in requests],
        "queue_mean_ms": queue,
        "prefill_mean_ms": prefill,
        "queue_p95_ms": [each * 2.2 for each in queue],
        "prefill_p95_ms": [each * 1.4 for each in prefill],
        "ttft_p50_ms": [each * 0.9 for each in ttft],
        "ttft_p95_ms": [round(each * 1.9, 1) for each in ttft],
        "ttft_p99_ms": [round(each * 2.6, 1) for each in ttft],
        "tpot_p50_ms": [round(17 + 3 * each, 1) for each in swing],
        "tpot_p95_ms": [round(24 + 6 * each, 1) for each in swing],
        "ttft_due": requests,
        "ttft_late": [round(max(0, each - 1.35) * load) for each in swing],
        "tpot_due": requests,
        "tpot_late": [0] * num,
    }


def whole(columns: dict) -> dict:
    """A series as one column: sums, and the last time that there is."""

    def one(values):
        if isinstance(values, dict):
            return {name: one(each) for name, each in values.items()}
        return [max(values)] if isinstance(values[0], float) else [sum(values)]

    return {name: each if isinstance(each, str) else one(each) for name, each in columns.items()}


def trail(name: str, now: int = NOW_MS // 1000) -> dict:
    """As `GET /admin/workers/{id}/history` answers."""
    random = Random(name)
    swing = [0.75 + 0.25 * math.sin(i / 13) + random.uniform(-0.05, 0.05) for i in range(180)]
    swing[40:52] = [None] * 12
    return {
        "step_s": 5,
        "times": [now - 5 * (180 - i) for i in range(180)],
        "tokens_per_s": [each and round(840 * each) for each in swing],
        "running": [each and round(40 * each) for each in swing],
        "waiting": [each and max(0, round(60 * (each - 0.9))) for each in swing],
        "kv_share": [each and round(0.8 * each, 3) for each in swing],
    }


def printed() -> list[dict]:
    """What a worker printed last."""
    lines = (
        "loading 291 tensors from model-00001-of-00004.safetensors",
        "weights: 16.1 GB in 8.2 s",
        "KV cache: 4096 blocks of 16 tokens",
        "captured 12 graphs, batches of 1 to 160",
        "ready",
    )
    return [{"at_ms": NOW_MS - 9_000 * (len(lines) - i), "text": line} for i, line in enumerate(lines)]


def added(rows: list[dict]) -> dict:
    """Several series as one."""

    def both(values):
        if isinstance(values[0], dict):
            return {name: both([each[name] for each in values]) for name in values[0]}
        columns = zip(*values, strict=True)
        return [max(each) if isinstance(each[0], float) else sum(each) for each in columns]

    return {
        name: "" if isinstance(rows[0][name], str) else both([each[name] for each in rows])
        for name in rows[0]
    }


def history(seconds: int, now: int = NOW_MS // 1000) -> dict:
    """As `GET /admin/history` answers."""
    step = 5 if seconds <= 900 else 300
    num = seconds // step
    rows = [
        series(Random(i), num, model, band, load * step)
        for i, (model, band, load) in enumerate(
            [("chat-70b", "interactive", 9), ("chat-70b", "batch", 3), ("chat-8b", "default", 16)]
        )
    ]
    times = [(now // step - num + 1 + i) * step for i in range(num)]
    return {
        "now": now,
        "step_s": step,
        "times": times,
        "series": rows,
        "summary": [whole(each) for each in rows],
        "total": (total := added(rows)),
        "total_summary": whole(total),
    }


def explained(request: dict, random: Random) -> dict:
    """As `GET /admin/requests/{id}` answers."""
    rows = []
    for i in range(4):
        parts = {
            "wait_s": random.uniform(0, 0.05),
            "prefill_s": random.uniform(0.02, 0.2),
            "tpot_s": 0.01 * i,
        }
        rows.append(
            {
                "worker": f"{request['model']}-{i:02d}",
                "score": round(sum(parts.values()), 4),
                "ttft_s": round(parts["wait_s"] + parts["prefill_s"], 4),
                "parts": parts,
                "facts": {
                    "running": 20 + i,
                    "slots": 64,
                    "device_tokens": 512 * (4 - i),
                    "backlog_tokens": 900,
                },
            }
        )
    rows.sort(key=lambda each: each["score"])
    rows[0]["worker"] = request.get("worker", rows[0]["worker"])
    rows.append({"worker": f"{request['model']}-29", "filtered": "not ready", "facts": {}})
    decision = {
        "request_id": request.get("request_id", ""),
        "model": request["model"],
        "at_ns": request["came_ns"] + round(request.get("dispatched_ms", 2) * 1e6) - 200_000,
        "policy": "ttft",
        "replay": {"is_equal": True, "worker": rows[0]["worker"], "reason": "best", "hold_s": 0.0},
        "worker": rows[0]["worker"],
        "reason": "best",
        "hold_s": 0.0,
        "request": {"prompt_tokens": request.get("prompt_tokens", 0)},
        "draws": [],
        "candidates": rows,
    }
    if request.get("attempts") == 1:
        return {"request": request, "decisions": [decision]}
    moved = decision | {"at_ns": decision["at_ns"] + 300_000_000, "worker": rows[1]["worker"]}
    return {"request": request, "decisions": [decision, moved]}


def told_of_alerts(now: int = NOW_MS // 1000) -> dict:
    """As `GET /admin/alerts` answers."""
    spans = ("5m", "30m", "1h", "6h", "1d", "3d")

    def row(model, band, objective, target, burns):
        windows = [
            {"window": span, "total": 1000, "bad": round((burn or 0) * 5), "burn": burn}
            for span, burn in zip(spans, burns, strict=True)
        ]
        left = None if burns[-1] is None else round(1 - burns[-1], 3)
        named = {"model": model, "band": band, "objective": objective, "target": target}
        return named | {"windows": windows, "budget_left": left}

    summaries = {rule.name: rule.summary for rule in reversed(rules(SloConfig()))}

    def alert(name, severity, labels, since, why, **more):
        book = f"docs/runbook.md#{name.lower()}"
        reported = {"name": name, "severity": severity, "labels": labels, "since": now - since, "why": why}
        return reported | {"summary": summaries[name], "runbook": book} | more

    where = {"model": "chat-70b", "band": "interactive", "burn": "14.4", "window": "1h"}
    late = "86.0% of requests had a late first token in 1h, limit 72.0%; 90.0% of requests in 5m, limit 72.0%"
    waits = "41 requests wait and 12 run"
    return {
        "now": now,
        "firing": [alert("TtftBurn", "page", where, 340, late)],
        "ended": [alert("QueueSustained", "ticket", {"model": "chat-8b"}, 9000, waits, ended=now - 7200)],
        "slo": [
            row("chat-70b", "interactive", "availability", 0.995, (0.2, 0.3, 0.2, 0.2, 0.4, 0.3)),
            row("chat-70b", "interactive", "ttft", 0.95, (21.0, 18.1, 17.2, 4.1, 1.6, 0.9)),
            row("chat-8b", "default", "tpot", 0.95, (0.0, 0.0, 0.1, 1.3, 0.1, None)),
        ],
    }


def told_of_events(now: int = NOW_MS // 1000) -> dict:
    """As `GET /admin/audit` answers."""
    events = (
        (
            "alert",
            "fires (page)",
            "TtftBurn, model chat-70b",
            "17.2 % of requests had a late first token",
            "",
            340,
        ),
        (
            "worker",
            "is left alone",
            "chat-8b-23",
            "its breaker is open: 3 of its last 10 requests failed",
            "",
            900,
        ),
        ("admin", "drained", "chat-70b-05", "", "admin-4be1a07c", 1500),
        ("config", "in force", "configuration", "", "", 4000),
        ("admin", "key made", "sk-k2v7q2mwz5ta", "tenant initech", "sk-opsboss2k7xq", 5200),
        ("alert", "is over", "QueueSustained, model chat-8b", "41 requests wait and 12 run", "", 7200),
        ("worker", "is ready", "chat-8b-29", "model chat-8b", "", 8000),
        (
            "worker",
            "is not ready",
            "chat-8b-29",
            "the worker was killed by SIGKILL; restart 1 in 1 s",
            "",
            8030,
        ),
        ("server", "started", "0.1.0", "", "", 93_784),
    )
    return {
        "events": [
            {"number": -i, "at_ms": (now - ago) * 1000}
            | dict(zip(("kind", "what", "about", "why", "by"), named, strict=True))
            for i, (*named, ago) in enumerate(events, -len(events))
        ],
        "total": len(events),
    }  # fmt: skip


def told_of_tenants() -> dict:
    """As `GET /admin/tenants` answers."""
    return {
        "total": len(TENANTS),
        "tenants": [
            {
                "id": name, "tier": ("pro", "free")[i % 2], "band": ("interactive", "default")[i % 2],
                "weight": 1.0, "live": 3 * i, "concurrent_max": 10 * (i % 3),
                "requests_per_minute": 600 * (i % 2),
                "tokens_per_minute": 200_000 * (i % 2), "spent_day_micros": 910_000 * i,
                "budget_day_micros": 2_000_000 * (i % 3), "spent_month_micros": 12_310_000 * i,
                "budget_month_micros": 40_000_000, "models": [] if i else ["chat-8b"],
            }
            for i, name in enumerate(TENANTS)
        ],
    }  # fmt: skip


def told_of_keys(now: int = NOW_MS // 1000) -> dict:
    """As `GET /admin/keys` answers."""
    states = ("active", "active", "revoked", "expired")
    keys = [
        {
            "prefix": f"sk-k{i}v7q2mwz5ta", "tenant": name, "tier": "", "label": ("batch", "", "ci", "")[i],
            "state": state, "created_s": now - 86_400 * (i + 3), "expires_s": 0 if i else now + 86_400 * 30,
            "admin": i == 1, "scrape": False,
        }
        for i, (name, state) in enumerate(zip(TENANTS, states, strict=True))
    ]  # fmt: skip
    return {"writable": True, "keys": keys, "total": len(keys)}


def told_of_costs(by: str = "tenant") -> dict:
    """As `GET /admin/costs` answers."""
    names = {"tenant": TENANTS, "model": ("chat-8b", "chat-70b"), "adapter": ("", "fr"), "day": DAYS}[by]
    lines = [
        {
            "name": name, "requests": 41_000 // (i + 1), "failed": 12 * i,
            "prompt_tokens": 38_000_000 // (i + 1),
            "cached_tokens": 21_000_000 // (i + 1), "completion_tokens": 9_400_000 // (i + 1),
            "cost_micros": 51_200_000 // (i + 1), "accelerator_cost_micros": 60_700_000 // (i + 1),
            "per_million_micros": 1_280_000,
        }
        for i, name in enumerate(names)
    ]  # fmt: skip
    sums = {name: sum(line[name] for line in lines) for name in lines[0] if name != "name"}
    machines = [
        {
            "name": name, "account": {
                "model": "", "bill": 168.0, "requests": 95.3, "platform": 4.1, "idle": 51.2 - 20 * i,
                "reserve": 17.4 + 20 * i, "floor": 70.2, "tokens": 74_000_000, "per_million": 2.27,
                "floor_per_million": 0.949, "over_floor": 2.4 - i,
            },
        }
        for i, name in enumerate(DAYS if by == "day" else ("chat-8b", "chat-70b"))
    ]  # fmt: skip
    return {
        "by": by, "since": DAYS[-1], "currency": "USD", "is_priced": True, "usage": lines,
        "num_lines": len(lines), "total": sums | {"name": "", "per_million_micros": 1_280_000},
        "machines": machines, "machines_total": machines[0]["account"] | {"bill": 336.0},
    }  # fmt: skip


def rollout(number: int, state: str, verdicts: str, **more: object) -> dict:
    """One of `GET /admin/rollouts`; `verdicts` are the first letters of those on its metrics."""
    words = {"f": "fine", "o": "open", "w": "worse"}
    random = Random(number)
    metrics = []
    for verdict, (name, margin) in zip(verdicts, METRICS, strict=True):
        width = margin * random.uniform(0.3, 0.6) * (3 if verdict == "o" else 1)
        middle = margin * 1.9 if verdict == "w" else margin * random.uniform(-0.2, 0.3)
        metrics.append(
            {
                "metric": name, "canary_requests": 702, "control_requests": 688, "difference": middle,
                "low": middle - width, "high": middle + width, "margin": margin, "verdict": words[verdict],
            }
        )  # fmt: skip
    began = NOW_MS - 3_600_000 * (number + 1)
    found = {
        "id": f"r{number}", "model": "support", "baseline": "support@1", "candidate": "support@2",
        "state": state, "why": "", "percent": 5.0, "step": 1, "steps": [1.0, 5.0, 25.0, 50.0],
        "began_ms": began, "step_began_ms": began + 1_500_000, "promotes": False, "metrics": metrics,
        "shadow": 0.0, "trouble": "",
    } | more  # fmt: skip
    assert found.keys() == set(RolloutReport.__struct_fields__)
    assert metrics[0].keys() == set(Reading.__struct_fields__)
    return found


def told_of_rollouts() -> dict:
    """As `GET /admin/rollouts` answers."""
    why = f"{METRICS[0][0]} +9.5% (+6.1% to +13.0%, allowed 5.0%)"
    waits = "certainty about failures, for 1320 s at most"
    before = {"candidate": "chat-8b@2", "baseline": "chat-8b@1", "model": "chat-8b", "percent": 0.0}
    return {
        "rollouts": [
            rollout(0, "running", "ffffo", why=waits),
            rollout(1, "rolled_back", "wffff", why=why, **before),
            rollout(2, "aborted", "ooooo", why="an operator has ended it", **before),
        ]
    }


def decision(number: int, move: str, why: str, workers: int, **more: object) -> dict:
    """One of an autoscaler's, `number` minutes ago."""
    opinions = [
        {"of": "reactive", "workers": workers - 1, "why": "11400 tokens/s come; 3200 are safe"},
        {"of": "capacity", "workers": workers, "why": EXPECTED},
        {"of": "floor", "workers": 2, "why": "min is 2"},
    ]  # fmt: skip
    return {
        "model": "chat-8b", "wall_ns": (NOW_MS - 60_000 * number) * 1_000_000, "move": move,
        "acts": True, "why": why, "ready": workers - 1, "pending": 0, "wanted": workers, "workers": workers,
        "pools": {"reserved": 3, "spot": workers - 3}, "opinions": opinions, "held_by": "",
        "safe_rate": 3200.0, "rate": 11_400.0, "forecast": 15_100.0, "cold_start_s": 40.0,
    } | more  # fmt: skip


def told_of_scale() -> dict:
    """As `GET /admin/scale` answers."""
    random = Random(5)
    points = []
    for i in range(180):
        swing = 0.7 + 0.5 * math.sin(i / 30)
        ready, pending = 3 + (i > 60) + (i > 66) + (i > 150), int(55 < i <= 66 or i > 143)
        points.append({
            "at_ms": NOW_MS - 5000 * (180 - i), "ready": ready, "pending": pending,
            "workers": ready + pending, "safe_rate": 3200.0,
            "rate": round(12_000 * swing + random.uniform(-600, 600)), "forecast": round(13_100 * swing),
            "waiting": 4, "late": 1, "due": 120, "shed": 0,
        })  # fmt: skip
    pools = [
        {"name": "reserved", "ready": 3, "pending": 0, "draining": 0, "asleep": 0, "workers": 3, "max": 3,
         "spot": False, "price": 1.2, "trouble": ""},
        {"name": "spot", "ready": 3, "pending": 1, "draining": 1, "asleep": 0, "workers": 4, "max": 8,
         "spot": True, "price": 0.4, "trouble": "no machine of this kind since 09:41, asked again in 30 s"},
    ]  # fmt: skip
    signals = {
        "now_ns": 1, "wall_ns": NOW_MS * 1_000_000, "window_s": 5.0, "pools": [], "arrived": 61,
        "answered": 58, "shed": 0, "work": 57_000.0, "protected_share": 0.4, "due": 58, "late": 1,
        "ttft_p95_s": 0.31, "ttft_p99_s": 0.44, "tpot_p95_s": 0.031, "wait_p95_s": 0.08, "waiting": 14,
        "running": 131, "kv_use": 0.62, "cold_starts_s": [], "override": None,
    }  # fmt: skip
    moves = [
        decision(2, "out", EXPECTED, 7),
        decision(11, "out", "9 requests wait", 6, held_by="fleet.scale_workers is 7"),
        decision(44, "in", "4 were enough for 300 s", 4),
        decision(80, "out", EXPECTED, 5, acts=False),
    ]  # fmt: skip
    reported = {"models": [{
        "model": "chat-8b", "mode": "act", "min": 2, "max": 11, "standby": 1, "workers": 7, "ready": 6,
        "pools": pools, "leads": True, "override": None,
        "decision": decision(0, "hold", EXPECTED, 7), "signals": signals, "moves": moves, "points": points,
    }]}  # fmt: skip
    assert isinstance(msgspec.convert(reported, ScaleReports), ScaleReports)
    return reported
