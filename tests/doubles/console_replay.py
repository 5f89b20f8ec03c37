"""A server of the built console that replays a drawn fleet: for the browser's tests, for pictures and for
`bench/console.py`. It answers as the gateway does and computes nothing; every number comes from one seed.
"""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

from penstock.gateway.api.console import _TYPES, PAGE_HEADERS, STATIC
from penstock.protocol.fleet import WorkerReport

MODELS = ("chat-70b", "chat-8b")
OUTCOMES = ("stop", "stop", "stop", "length", "tool_calls", "stop", "abort", "shed")
TENANTS = ("acme", "globex", "initech", "umbrella")
DAYS = ("2026-11-18", "2026-11-17")
FIELDS = {"adapters": [], "adapters_loaded": [], "notes": [], "stage": "", "left_alone": "", "age_s": None}
NOW_MS = 1_795_000_000_000


def state_of(number: int) -> dict:
    """A few workers that are not ready, so that every state is seen."""
    odd = {
        5: {"state": "draining", "stage": "draining"},
        11: {"state": "loading", "stage": "loading weights, 43 %"},
        17: {"state": "suspect", "stage": "suspect: no answer for 6 s", "age_s": 6},
        23: {"left_alone": "fails: 3 of its last 10 requests"},
        29: {
            "state": "gone",
            "stage": "given up after 5 restarts",
            "restarts": 5,
            "notes": ["2026-11-18 11:02:07 UTC: the worker was killed by SIGKILL"],
        },
    }
    return {"state": "ready"} | odd.get(number, {})


class Fleet:
    """Workers whose load goes up and down."""

    def __init__(self, num_workers: int, streams: int, seed: int = 1) -> None:
        self.random, self.streams, self.num_ended = Random(seed), streams, 0
        self.workers = {}
        for number in range(num_workers):
            model = MODELS[number % 3 != 0]
            name = f"{model}-{number:02d}"
            self.workers[name] = {
                "id": name,
                "model": model,
                "engine": "penstock" if number % 7 else "vllm",
                "epoch": 1,
                "version": "0.1.0" if number % 7 else "0.11.2",
                "residual": None if number % 7 == 0 else round(1 + self.random.gauss(0, 0.02), 3),
                "address": f"tcp:10.0.{number // 32}.{number % 32}:9000",
                "identity": f"{self.random.getrandbits(128):032x}",
                "kv_blocks_total": 4096,
                "generated_tokens": number * 1000,
                "restarts": 0,
                **FIELDS,
                **state_of(number),
            }
        self.ticks = 0
        optional = {"version", "residual"}  # As far as a worker and its probes say them.
        assert set(next(iter(self.workers.values()))) - optional <= set(WorkerReport.__struct_fields__)

    def step(self) -> dict:
        """One second: what changed."""
        self.ticks += 1
        changes = {}
        up = [each for each in self.workers.values() if each["state"] in ("ready", "draining")]
        for number, worker in enumerate(up):
            swing = 0.75 + 0.25 * math.sin(self.ticks / 23 + number) + self.random.uniform(-0.05, 0.05)
            running = max(0, round(self.streams / len(up) * swing))
            waiting = max(0, round((swing - 0.9) * self.streams / len(up) / 3))
            new = {
                "running": running,
                "waiting": waiting,
                "kv_blocks_used": min(4096, round(4096 * 0.82 * swing)),
                "generated_tokens": worker["generated_tokens"] + round(running * self.random.uniform(18, 24)),
            }
            changes[worker["id"]] = {name: value for name, value in new.items() if worker.get(name) != value}
            worker.update(new)
        return changes

    def fleet(self, changes: dict | None) -> dict:
        """The event; all of it if `changes` is None."""
        up = [each for each in self.workers.values() if each["state"] == "ready"]
        served = self.ticks * self.streams // 6
        return {
            "at_ms": NOW_MS + self.ticks * 1000,
            "server": {
                "version": "0.1.0",
                "uptime_s": 93_784 + self.ticks,
                "connections": self.streams + 41,
                "streams": self.streams,
                "processes": 1,
                "draining": False,
                "auth": True,
            },
            "models": [
                {
                    "name": model,
                    "waiting": (self.ticks * 7) % 13 if model == MODELS[0] else 0,
                    "ready": sum(each["model"] == model for each in up),
                    "workers": sum(each["model"] == model for each in self.workers.values()),
                    "ttft_sum_s": served * 0.143,
                    "ttft_count": served,
                }
                for model in MODELS
            ],
            "whole": changes is None,
            "workers": self.workers if changes is None else changes,
            "gone": [],
        }

    def ended(self, count: int) -> list[dict]:
        """So many requests that have just ended."""
        return [self._one() for _ in range(count)][::-1]

    def _one(self) -> dict:
        random = self.random
        self.num_ended += 1
        tenant, outcome = random.choice(TENANTS), random.choice(OUTCOMES)
        queue, prefill = random.expovariate(1 / 40), random.uniform(20, 160)
        tokens = random.randint(4, 600)
        tpot = random.uniform(14, 30)
        worker = random.choice([each for each in self.workers.values() if each["state"] == "ready"])
        found = {
            "number": self.num_ended,
            "id": f"req-{random.getrandbits(48):012x}",
            "came_ms": NOW_MS + self.ticks * 1000 - round(queue + prefill + tokens * tpot),
            "came_ns": 10**9,
            "endpoint": random.choice(("chat", "chat", "completions", "responses")),
            "tenant": tenant,
            "model": worker["model"],
            "status": 503 if outcome == "shed" else 200,
            "outcome": outcome,
            "total_ms": 3.1,
        }
        if outcome == "shed":
            return found | {"error": "Overloaded", "came_ms": NOW_MS + self.ticks * 1000 - 3}
        return found | {
            "request_id": f"chatcmpl-{random.getrandbits(64):016x}",
            "key_prefix": f"sk-{tenant[:4]}k7q2m",
            "band": random.choice(("interactive", "default", "batch")),
            "worker": worker["id"],
            "prompt_tokens": (prompt := random.randint(20, 6000)),
            "cached_tokens": (cached := random.choice((0, prompt // 16 * 12))),
            "generated_tokens": tokens,
            "limits_ms": 1.1,
            "admitted_ms": 1.8,
            "queue_ms": round(queue, 2),
            "dispatched_ms": round(1.8 + queue, 2),
            "worker_queue_ms": round(prefill / 9, 2),
            "prefill_chunks": -(-(prompt - cached) // 2048),
            "computed_tokens": prompt - cached,
            "ttft_ms": round(1.8 + queue + prefill, 2),
            "tpot_ms": round(tpot, 2),
            "total_ms": round(1.8 + queue + prefill + tokens * tpot, 2),
            "attempts": 1,
            "cost_micros": prompt * 3 + tokens * 15,
        }


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

    def alert(name, severity, labels, since, why, **more):
        book = f"docs/runbook.md#{name.lower()}"
        told = {"name": name, "severity": severity, "labels": labels, "since": now - since, "why": why}
        return told | {"summary": "First tokens come late.", "runbook": book} | more

    where = {"model": "chat-70b", "band": "interactive", "factor": "14.4", "window": "1h"}
    late = "The budget of first tokens in time burns 17.2 times too fast over 1 h, 21.0 times over 5 min."
    waits = "More than 40 requests waited for 10 minutes."
    return {
        "now": now,
        "firing": [alert("PenstockTtftBurnsFast", "page", where, 340, late)],
        "ended": [
            alert("PenstockQueueSustained", "warning", {"model": "chat-8b"}, 9000, waits, ended=now - 7200)
        ],
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


class Replay(ThreadingHTTPServer):
    """One drawn server. `period_s` is how often its feed tells."""

    daemon_threads = True

    def __init__(
        self, *, num_workers: int = 12, streams: int = 480, period_s: float = 1.0, role: str = "admin"
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fleet, self.period_s, self.role = Fleet(num_workers, streams), period_s, role
        self.known: dict[str, dict] = {}
        self.orders: list[str] = []
        self.answers: dict[str, object] = {
            "/admin/alerts": told_of_alerts(),
            "/admin/audit": told_of_events(),
            "/admin/tenants": told_of_tenants(),
            "/admin/keys": told_of_keys(),
        }
        self.per_event = max(2, min(100, streams // 60))
        self.warm_ticks = 120
        """Seconds that are told at once, so that a page that has just been opened has something to show."""
        self.stopped = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Replay

    def log_message(self, *args) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/console", "/"):
            self._file("index.html")
        elif path.removeprefix("/console/") in _TYPES:
            self._file(path.removeprefix("/console/"))
        elif path == "/console/feed":
            self._feed()
        elif path == "/admin/history":
            self._json(history(int(self.path.rpartition("=")[2])))
        elif path.endswith("/history"):
            self._json(trail(path.split("/")[3]))
        elif path.endswith("/log"):
            self._json({"worker": path.split("/")[3], "lines": printed()})
        elif path.startswith("/admin/requests/"):
            self._json(explained(self.server.known[path.rpartition("/")[2]], Random(3)))
        elif path == "/admin/costs":
            self._json(told_of_costs(self.path.partition("by=")[2].partition("&")[0]))
        elif path in self.server.answers:
            self._json(self.server.answers[path])
        else:
            self._json({"error": {"message": f"This server has no {path}.", "code": "unknown_path"}}, 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.orders.append(self.path)
        name, _, verb = self.path.removeprefix("/admin/workers/").rpartition("/")
        state = "draining" if verb == "drain" else "ready"
        self.server.fleet.workers[name] |= {"state": state}
        self._json({"id": name, "state": state, "streams": 0})

    def _file(self, name: str) -> None:
        body = (STATIC / name).read_bytes()
        self.send_response(200)
        self.send_header("content-type", _TYPES[name].decode())
        for header, value in PAGE_HEADERS:
            self.send_header(header.decode(), value.decode())
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, shape: object, status: int = 200) -> None:
        body = json.dumps(shape).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _feed(self) -> None:
        server, fleet = self.server, self.server.fleet
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        hello = {"role": server.role, "tenant": "", "ttft_target_ms": 500, "tpot_target_ms": 50}
        try:
            self._event("hello", hello)
            self._event("fleet", fleet.fleet(None))
            for _ in range(server.warm_ticks):
                self._tell()
            while not server.stopped.wait(server.period_s):
                self._tell()
        except OSError:
            return  # The page has left.

    def _tell(self) -> None:
        server, fleet = self.server, self.server.fleet
        states = {name: {"state": each["state"]} for name, each in fleet.workers.items()}
        changes = fleet.step()
        for name, each in states.items():
            changes.setdefault(name, {}).update(each)
        self._event("fleet", fleet.fleet(changes))
        ended = fleet.ended(server.per_event)
        server.known |= {each["id"]: each for each in ended}
        self._event("requests", ended)

    def _event(self, name: str, shape: object) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(shape)}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    replay = Replay()
    print(replay.url)
    while True:
        time.sleep(60)
