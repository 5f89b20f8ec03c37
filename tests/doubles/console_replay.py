"""A server of the built console that replays a drawn fleet: for the browser's tests and for pictures. It
answers as the gateway does and computes nothing; every number comes from one seed.
"""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import console_answers as reported
from console_answers import NOW_MS, TENANTS

from penstock.gateway.api.console import _TYPES, PAGE_HEADERS, STATIC
from penstock.protocol.fleet import WorkerReport

MODELS = ("chat-70b", "chat-8b")
OUTCOMES = ("stop", "stop", "stop", "length", "tool_calls", "stop", "abort", "shed")
FIELDS = {"adapters": [], "adapters_loaded": [], "notes": [], "stage": "", "left_alone": "", "age_s": None}


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
        self.models: tuple[str, ...] = MODELS
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
                for model in self.models
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
        self.plans: list[dict] = []
        """Of rollouts that were begun."""
        self.answers: dict[str, object] = {
            "/admin/alerts": reported.told_of_alerts(),
            "/admin/audit": reported.told_of_events(),
            "/admin/tenants": reported.told_of_tenants(),
            "/admin/keys": reported.told_of_keys(),
            "/admin/rollouts": reported.told_of_rollouts(),
            "/admin/scale": reported.told_of_scale(),
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
            self._json(reported.history(int(self.path.rpartition("=")[2])))
        elif path.endswith("/history"):
            self._json(reported.trail(path.split("/")[3]))
        elif path.endswith("/log"):
            self._json({"worker": path.split("/")[3], "lines": reported.printed()})
        elif path.startswith("/admin/requests/"):
            self._json(reported.explained(self.server.known[path.rpartition("/")[2]], Random(3)))
        elif path == "/admin/costs":
            self._json(reported.told_of_costs(self.path.partition("by=")[2].partition("&")[0]))
        elif path in self.server.answers:
            self._json(self.server.answers[path])
        else:
            self._json({"error": {"message": f"This server has no {path}.", "code": "unknown_path"}}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.orders.append(self.path)
        if self.path == "/admin/scale":
            self.server.plans.append(order := json.loads(body))
            model = self.server.answers["/admin/scale"]["models"][0]
            until_ns = reported.NOW_MS * 1_000_000 + round(order.get("for_s", 0) * 1e9)
            by_hand = {"workers": order.get("workers"), "until_ns": until_ns, "by": "sk-k1v7q2mwz5ta"}
            model["override"] = by_hand if "workers" in order else None
            self._json(self.server.answers["/admin/scale"])
            return
        if self.path.startswith("/admin/rollouts"):
            self._json(self._roll_out(body))
            return
        name, _, verb = self.path.removeprefix("/admin/workers/").rpartition("/")
        state = "draining" if verb == "drain" else "ready"
        self.server.fleet.workers[name] |= {"state": state}
        self._json({"id": name, "state": state, "streams": 0})

    def _roll_out(self, body: bytes) -> dict:
        """Begin or end one."""
        report = self.server.answers["/admin/rollouts"]
        parts = self.path.removeprefix("/admin/rollouts").strip("/").split("/")
        if len(parts) == 2:
            found = next(each for each in report["rollouts"] if each["model"] == parts[0])
            state, percent = {"promote": ("promoted", 100.0), "abort": ("aborted", 0.0)}[parts[1]]
            found |= {"state": state, "percent": percent, "why": "an operator has said so"}
            return report
        plan = json.loads(body)
        self.server.plans.append(plan)
        known = {"model": plan["model"], "candidate": plan["candidate"], "steps": plan["steps"]}
        begun = reported.rollout(
            len(report["rollouts"]), "running", "ooooo", **known, step=0, percent=plan["steps"][0]
        )
        report["rollouts"].insert(0, begun)
        return report

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
