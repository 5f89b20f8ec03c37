"""Settings that are each fine but not together, and those that would open a door by accident."""

import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from penstock.config.cells import cell_problems, residency_problems
from penstock.config.checkpoints import plain_name, served_name
from penstock.config.fleet import WORKERS_MAX, discover_problems, worker_problems
from penstock.config.flow import queue_problems, shared_problems
from penstock.config.ledger import price_problems
from penstock.config.routing import AUTO, ensemble_problems, routing_problems
from penstock.config.scale import scale_problems, workload_problems
from penstock.config.tenancy import access_problems, host_problems, tenant_problems
from penstock.config.tree import MODEL_LEN_MIN, Config, EngineConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.types import VERSIONED

_FORM = re.compile(r"https?://[^\s/?#@]+(/[!-~]*)?")
"""No user and password: they belong into a header. A host or path with other letters is written as browsers
send it (xn--, %C3%A4)."""


def is_address(url: str) -> bool:
    """Whether something can be posted there."""
    if not (url.isascii() and _FORM.fullmatch(url) and "#" not in url):
        return False
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # As sockets do: a part of a name has 1 to 63 letters.
    except ValueError:  # Also a port that is none, and brackets around what is no address.
        return False
    return bool(host) and port != 0


def check(config: Config) -> None:
    """Refuse settings that contradict each other or would open a door by accident.

    Raises:
        ConfigError: with one line for each thing that is wrong.
    """
    problems = [
        *access_problems(config.auth, config.server.host),
        *host_problems(config.server.hosts),
        *_origin_problems(config.server.cors_origins),
        *queue_problems(config.queue),
        *tenant_problems(
            config.tenants, config.tiers, config.auth, [band.name for band in config.queue.bands]
        ),
        *_cell_problems(config),
        *_limit_problems(config),
        *_model_problems(config),
        *_fleet_problems(config),
        *routing_problems(config.routing, config.admission, [served_name(model) for model in config.models]),
        *_ensemble_problems(config),
        *price_problems(config.prices),
        *_trace_problems(config.traces.endpoint),
        *_webhook_problems(config.slo.webhook),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")


_HAS_PATH = re.compile(r"https?://[^/]+/.*")


def _origin_problems(origins: Sequence[str]) -> Iterator[str]:
    for i, origin in enumerate(origins):
        if origin == "*" and len(origins) > 1:
            yield f"server.cors_origins[{i}]: '*' is all origins, so it stands alone"
        elif origin != "*" and not _ORIGIN.fullmatch(origin):
            yield (
                f"server.cors_origins[{i}]: expected '*' or SCHEME://HOST[:PORT] in lower case, without a "
                f"path, as browsers send it, got {origin[:80]!r}"
            )


def _trace_problems(endpoint: str) -> Iterator[str]:
    if endpoint and not (is_address(endpoint) and _HAS_PATH.fullmatch(endpoint)):
        yield (
            "traces.endpoint: expected http(s)://HOST[:PORT]/v1/traces, where the collector takes OTLP over "
            f"HTTP, got {endpoint[:80]!r}"
        )


def _webhook_problems(url: str) -> Iterator[str]:
    if url and not is_address(url):  # It may hold a secret, so it is not repeated.
        yield "slo.webhook: expected http(s)://HOST[:PORT]/PATH, where alerts are posted"


def _cell_problems(config: Config) -> Iterator[str]:
    yield from cell_problems(config.cells)
    for section, allowances in (("tenants", config.tenants), ("tiers", config.tiers)):
        for i, each in enumerate(allowances):
            yield from residency_problems(each.residency or (), config.cells, f"{section}[{i}].residency")


def _limit_problems(config: Config) -> Iterator[str]:
    if config.limits.n_max > config.limits.concurrent_max:
        yield "limits.n_max: above limits.concurrent_max, so such a request could never run"
    yield from shared_problems(config.shared)


def _model_problems(config: Config) -> Iterator[str]:
    if not config.models:
        yield "models: at least one is needed"
    seen: dict[str, int] = {}
    versions: dict[str, int] = {}
    listening: dict[str, str] = {}
    for i, model in enumerate(config.models):
        name = served_name(model)
        if not model.path:
            yield f"models[{i}].path: empty"
        elif not re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,256}", name):
            yield f"models[{i}].name: expected 1 to 256 characters without white space, got {name!r}"
        elif name in seen:
            yield f"models[{i}].name: {name!r} is the name of models[{seen[name]}] already"
        elif model.version and plain_name(model) in seen:
            yield f"models[{i}].version: models[{seen[plain_name(model)]}] has the name without a version"
        elif not model.version and (first := versions.get(name)) is not None:
            yield f"models[{i}].name: {name!r} means a version of models[{first}] already"
        elif VERSIONED.fullmatch(plain_name(model)):
            yield f"models[{i}].name: {name!r} ends like a version; set models[{i}].version"
        seen.setdefault(name, i)
        if model.version:
            versions.setdefault(plain_name(model), i)
        yield from _adapter_problems(config, i, model)
        engine = model.engine
        yield from _kv_event_problems(engine, f"models[{i}].engine.kv_events", listening)
        if engine.max_model_len == 1:
            yield (
                f"models[{i}].engine.max_model_len: 1 leaves no room for a prompt and an answer; at least "
                f"{MODEL_LEN_MIN}, "
                "or 0 for the model's own limit"
            )
        if engine.step_tokens < engine.max_running:
            yield (
                f"models[{i}].engine.step_tokens: {engine.step_tokens} is below max_running "
                f"({engine.max_running}): every running request needs a token of each step"
            )


def _ensemble_problems(config: Config) -> Iterator[str]:
    models = {name: None for model in config.models for name in (served_name(model), plain_name(model))}
    adapters = [name for model in config.models for name in model.adapters]
    yield from ensemble_problems(config.ensembles, list(models), adapters)


def _adapter_problems(config: Config, i: int, model: ModelConfig) -> Iterator[str]:
    for name, path in model.adapters.items():
        key = f"models[{i}].adapters.{name[:64]}"
        if not re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,256}", name):
            yield f"models[{i}].adapters: expected names without white space, got {name!r}"
        elif any(name in (served_name(other), plain_name(other)) for other in config.models):
            yield f"{key}: a model has this name"
        elif name == AUTO and config.routing.auto:
            yield f"{key}: the choice between models has this name"
        elif any(name in other.adapters for other in config.models[:i]):
            yield f"{key}: another model has an adapter of this name"
        elif "://" in path and not path.lower().startswith(("http://", "https://", "s3://", "file://")):
            yield f"{key}: expected a directory, http://, https:// or s3://, got {path[:80]!r}"
        elif not path:
            yield f"{key}: empty"
    if model.adapters and model.replicas and not model.engine.adapter_slots:
        yield f"models[{i}].engine.adapter_slots: 0, so no adapter could be used"


_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_IPC = re.compile(r"ipc://[^\x00]{1,100}")


def _kv_event_problems(engine: EngineConfig, key: str, listening: dict[str, str]) -> Iterator[str]:
    """Problems of the ZeroMQ addresses; `listening` says which key has taken an address already."""
    events = engine.kv_events
    if not events.endpoint:
        if events.replay_endpoint:
            yield f"{key}.replay_endpoint: of no use without {key}.endpoint"
        return
    if not engine.prefix_cache:
        yield f"{key}.endpoint: of no use without prefix_cache, since nothing is ever cached"
    for name, address in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
        if not address:
            continue
        tcp = _TCP.fullmatch(address)
        if tcp is None and _IPC.fullmatch(address) is None:
            yield f"{key}.{name}: expected tcp://ADDRESS:PORT or ipc://PATH, got {address!r}"
        elif tcp is not None and not 0 < int(tcp[2]) <= 65_535:
            yield f"{key}.{name}: expected a port from 1 to 65535, got {tcp[2]}"
        elif name == "endpoint" and events.connect:
            if tcp is not None and tcp[1] == "*":
                yield f"{key}.endpoint: with connect it needs the address of a subscriber, got {address!r}"
        elif address in listening:
            yield f"{key}.{name}: {address} is taken by {listening[address]}"
        else:
            listening[address] = f"{key}.{name}"


def _fleet_problems(config: Config) -> Iterator[str]:
    """One line for each thing that is wrong."""
    taken: dict[tuple[str, str], str] = {}
    count = 0
    if config.fleet.memory_bytes and config.fleet.launcher != "local":
        yield "fleet.memory_bytes: bounds this machine, and with fleet.launcher ray the workers are elsewhere"
    for i, model in enumerate(config.models):
        count += (model.scale.max or model.replicas) + len(model.workers)
        yield from scale_problems(model.scale, model.replicas, f"models[{i}].scale")
        yield from workload_problems(model.scale, model.replicas, model.discover, f"models[{i}]")
        if config.server.processes > 1 and any(pool.workload for pool in model.scale.pools):
            yield (
                f"server.processes: {config.server.processes}, but models[{i}].scale.pools are Kubernetes "
                f"workloads; run several servers with one shared.url, of which one decides"
            )
        if not (model.replicas or model.scale.max or model.workers or model.discover or config.cells.peers):
            yield f"models[{i}].replicas: 0, and there are no workers: no worker would answer"
        for j, discover in enumerate(model.discover):
            yield from discover_problems(discover, f"models[{i}].discover[{j}]")
        limit = model.scale.max or model.replicas
        if limit > 1 and model.engine.kv_events.endpoint:
            yield f"models[{i}].engine.kv_events.endpoint: {limit} replicas cannot share one address"
        for j, worker in enumerate(model.workers):
            key = f"models[{i}].workers[{j}]"
            yield from worker_problems(worker, key)
            # One server may have several models; the same one under the same name twice would count its
            # capacity twice.
            same = (worker.url.rstrip("/"), worker.served_model or model.name or model.path)
            if same in taken:
                yield f"{key}.url: {worker.url} is {taken[same]} already"
            taken.setdefault(same, key)
    if count > WORKERS_MAX:
        yield f"models: {count} workers are configured, which is over the bound of {WORKERS_MAX}"
