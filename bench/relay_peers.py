"""CPU of a relaying gateway per 1,000 requests, ours beside others', in one run.

    python bench/relay_peers.py [--rounds 3] [--only penstock,smg] [--peers VENV] [--out FILE] [--quick]

A load client and an upstream in C (bench/relay/*.c, built here) cost next to nothing; between them stands one gateway
process, whose CPU time (/proc/PID/stat, children included) and memory are read. Three shapes: `whole` answers at 64 connections;
`chunks`: 64 chunks as fast as they are taken, 64 connections; `paced`: 256 chunks, one per 20 ms, 256 connections. `alone` is one connection
at a time: what its latency exceeds the upstream's own by is what the gateway adds (ours: a worker's that gives one token per
step, asked without a gateway by bench/relay/direct.py). Ours talks to a stand-in worker in our own protocol, and does all
that a proxy does not: tokenizing, detokenizing, encoding events. bench/relay/install_peers.sh makes VENV.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "relay"
KEY = "sk-bench-0123456789abcdef"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
START_S = 90.0
PACE_US = 20_000


@dataclass(frozen=True)
class Shape:
    """One kind of traffic."""

    name: str
    connections: int
    requests: int
    chunks: int
    """0: not streamed."""
    period_us: int = 0


SHAPES = (
    Shape("alone", 1, 1000, 0),
    Shape("whole", 64, 6000, 0),
    Shape("chunks", 64, 3000, 64),
    Shape("paced", 256, 768, 256, PACE_US),
)


class Process:
    """A child and what it used."""

    def __init__(self, *command: str, log: Path, **environment: str) -> None:
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
            )

    def pids(self) -> list[int]:
        """It and its descendants: a gateway may be several processes."""
        found, todo = [], [self.child.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                todo += [int(word) for word in task.read_text().split()]
        return found

    def cpu_s(self) -> float:
        """User and system time of all of it."""
        total = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total * TICK_S

    def rss_mb(self) -> float:
        """Resident memory of all of it."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids())
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def end(self) -> None:
        """Stop it."""
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGTERM)
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()


def build(into: Path) -> None:
    """Compile the client and the upstream."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("a C compiler is needed")
    for name in ("load", "upstream"):
        subprocess.run([compiler, "-O2", "-o", str(into / name), str(HERE / f"{name}.c")], check=True)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def request_bytes(port: int, chunks: int, model: str) -> bytes:
    """The request that the load client sends again and again."""
    body = {
        "model": model,
        "messages": [
            {"role": "user", "content": "How does water from a mountain lake become electric light?"}
        ],
        "max_tokens": chunks or 12,
    }
    if chunks:
        body["stream"] = True
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def litellm_config(place: Path, upstream: int) -> Path:
    """LiteLLM's proxy with one model and a master key."""
    path = place / "litellm.yaml"
    path.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n"
        f"      api_base: http://127.0.0.1:{upstream}/v1\n      api_key: x\n"
        f"general_settings:\n  master_key: {KEY}\n"
    )
    return path


def command_of(gateway: str, port: int, upstream: int, worker: str, venv: Path, place: Path) -> list[str]:
    """How to start a gateway on `port`."""
    url = f"http://127.0.0.1:{upstream}"
    if gateway.startswith("penstock"):
        off = gateway.partition("-")[2] or "all"
        return [sys.executable, str(HERE / "gateway.py"), worker, str(port), off]
    if gateway == "smg":
        flags = ["--worker-urls", url, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        return [str(venv / "bin/smg"), "launch", *flags]
    if gateway == "vllm-router":
        flags = ["--worker-urls", url, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        return [str(venv / "bin/vllm-router"), *flags]
    if gateway == "litellm":
        config = str(litellm_config(place, upstream))
        return [str(venv / "bin/litellm"), "--config", config, "--port", str(port), "--host", "127.0.0.1"]
    sys.exit(f"no such gateway: {gateway}")


def load(place: Path, port: int, shape: Shape, requests: int) -> dict[str, float]:
    """Send requests; what the client saw."""
    file = place / "request"
    file.write_bytes(request_bytes(port, shape.chunks, "m"))
    done = subprocess.run(
        [str(place / "load"), str(port), str(shape.connections), str(requests), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    seen = json.loads(done.stdout)
    if seen["errors"]:
        raise RuntimeError(f"{seen['errors']} errors: {done.stderr[:500]}")
    return seen


def wait_answers(place: Path, port: int, process: Process | None) -> None:
    """Until one whole answer comes back."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            load(place, port, Shape("probe", 1, 1, 0), 1)
            return
        except RuntimeError as error:
            if time.monotonic() > deadline or (process and process.child.poll() is not None):
                raise RuntimeError(f"it does not answer: {error}") from error
            time.sleep(0.3)


def measure(gateway: str, shape: Shape, place: Path, venv: Path, scale: float) -> dict[str, float]:
    """One gateway under one shape."""
    port, upstream_port, worker = free_port(), free_port(), str(place / "worker.sock")
    requests = max(shape.connections, int(shape.requests * scale))
    log = place / f"{gateway}.log"
    if gateway.startswith("penstock"):
        script = str(HERE / "stand_in_worker.py")
        behind = Process(sys.executable, script, worker, str(shape.period_us), log=log)
    else:
        chunks = str(shape.chunks or 1)
        behind = Process(str(place / "upstream"), str(upstream_port), chunks, str(shape.period_us), log=log)
    time.sleep(0.3)
    process = None
    try:
        if gateway == "upstream":
            port, process = upstream_port, behind
        else:
            process = Process(*command_of(gateway, port, upstream_port, worker, venv, place), log=log)
        wait_answers(place, port, process)
        load(place, port, shape, max(shape.connections, requests // 10))  # Warm up.
        before, started = process.cpu_s(), time.monotonic()
        seen = load(place, port, shape, requests)
        cpu_s, wall_s = process.cpu_s() - before, time.monotonic() - started
        if shape.name == "alone" and gateway.startswith("penstock"):
            seen["direct_p50_us"] = direct_us(worker, requests)
        return {
            "cpu_s_per_1000": cpu_s / requests * 1000,
            "rss_mb": process.rss_mb(),
            "wall_s": wall_s,
            **seen,
        }
    finally:
        for each in (process, behind):
            if each is not None:
                each.end()


def direct_us(worker: str, requests: int) -> float:
    """The worker's own time for the same answers, one at a time: what ours adds is what goes beyond it."""
    command = [sys.executable, str(HERE / "direct.py"), worker, str(requests), "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["total_p50_us"])


def show(results: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """A table of medians."""
    print(f"{'gateway':18} {'whole':>8} {'chunks':>8} {'paced':>8}  {'RSS MB':>7} {'added p50 us':>13}")
    for gateway, shapes in results.items():
        cells = []
        for name in ("whole", "chunks", "paced"):
            rounds = shapes.get(name, [])
            cells.append(
                f"{statistics.median(r['cpu_s_per_1000'] for r in rounds):8.3f}" if rounds else " " * 8
            )
        rss = max((r["rss_mb"] for rounds in shapes.values() for r in rounds), default=0)
        bare = statistics.median(
            r["total_p50_us"] for r in results.get("upstream", {}).get("alone", [{"total_p50_us": 0.0}])
        )
        added = [r["total_p50_us"] - r.get("direct_p50_us", bare) for r in shapes.get("alone", [])]
        latency = f"{statistics.median(added):13.0f}" if added else ""
        print(f"{gateway:18} {' '.join(cells)}  {rss:7.0f} {latency}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="upstream,penstock,penstock-access,smg,vllm-router,litellm")
    parser.add_argument("--shapes", default="alone,whole,chunks,paced")
    parser.add_argument("--peers", type=Path, default=Path("bench/out/relay-peers"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests, one round")
    args = parser.parse_args()
    gateways = [name for name in args.only.split(",") if name]
    shapes = [shape for shape in SHAPES if shape.name in args.shapes.split(",")]
    results: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in gateways}
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        place = Path(name)
        build(place)
        for number in range(1 if args.quick else args.rounds):
            for shape in shapes:
                for gateway in gateways[number % len(gateways) :] + gateways[: number % len(gateways)]:
                    slow = gateway == "litellm" or shape.name == "alone"
                    scale = (0.2 if args.quick else 1.0) * (0.1 if slow and gateway == "litellm" else 1.0)
                    try:
                        found = measure(gateway, shape, place, args.peers.absolute(), scale)
                    except (RuntimeError, FileNotFoundError) as error:
                        print(f"{gateway} {shape.name}: {error}", file=sys.stderr)
                        continue
                    results[gateway].setdefault(shape.name, []).append(found)
                    print(gateway, shape.name, json.dumps(found), flush=True)
    show(results)
    if args.out:
        args.out.write_text(json.dumps({"shapes": [vars(s) for s in shapes], "results": results}, indent=1))


if __name__ == "__main__":
    main()
