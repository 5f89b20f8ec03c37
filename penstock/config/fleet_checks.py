"""What is wrong with the workers of a configuration."""

import re
from collections.abc import Iterator, Sequence

from penstock.config.fleet import WORKERS_MAX, DiscoverConfig, WorkerConfig
from penstock.config.tree import ModelConfig

_HTTP = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?(/[^\s?#]*)?")
_OWN = re.compile(r"tcp:(//)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})|unix:/[^\x00]{1,106}")
_NAME_AND_PORT = re.compile(
    r"[A-Za-z0-9.-]{1,253}:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-5][0-9]{2})"
)
_SRV = re.compile(r"_[A-Za-z0-9-]{1,62}\._(tcp|udp)\.[A-Za-z0-9.-]{1,253}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def fleet_problems(models: Sequence[ModelConfig]) -> Iterator[str]:
    """One line for each thing that is wrong."""
    taken: dict[tuple[str, str], str] = {}
    count = 0
    for i, model in enumerate(models):
        count += model.replicas + len(model.workers)
        if not model.replicas and not model.workers and not model.discover:
            yield f"models[{i}].replicas: 0, and there are no workers: nobody would answer"
        for j, discover in enumerate(model.discover):
            yield from _discover_problems(discover, f"models[{i}].discover[{j}]")
        if model.replicas > 1 and model.engine.kv_events.endpoint:
            yield f"models[{i}].engine.kv_events.endpoint: {model.replicas} replicas cannot share one address"
        for j, worker in enumerate(model.workers):
            key = f"models[{i}].workers[{j}]"
            yield from _worker_problems(worker, key)
            # One server may have several models; the same one under the same name twice would count its
            # capacity twice.
            same = (worker.url.rstrip("/"), worker.served_model or model.name or model.path)
            if same in taken:
                yield f"{key}.url: {worker.url} is {taken[same]} already"
            taken.setdefault(same, key)
    if count > WORKERS_MAX:
        yield f"models: {count} workers are configured, which is over the bound of {WORKERS_MAX}"


def _discover_problems(discover: DiscoverConfig, key: str) -> Iterator[str]:
    kubernetes = discover.kubernetes
    if bool(discover.dns) == (kubernetes is not None):
        yield f"{key}: expected exactly one of dns and kubernetes"
    if discover.dns and not (_NAME_AND_PORT.fullmatch(discover.dns) or _SRV.fullmatch(discover.dns)):
        yield f"{key}.dns: expected name:port or _service._tcp.name, got {discover.dns!r}"
    if kubernetes is not None:
        for field in ("namespace", "service"):
            if not _LABEL.fullmatch(name := getattr(kubernetes, field)):
                yield f"{key}.kubernetes.{field}: expected a name of 1 to 63 of a-z, 0-9 and -, got {name!r}"
        if kubernetes.api_server and not _HTTP.fullmatch(kubernetes.api_server):
            yield f"{key}.kubernetes.api_server: expected https://HOST:PORT, got {kubernetes.api_server!r}"
        if kubernetes.api_server.startswith("http:") and kubernetes.account:
            yield (
                f"{key}.kubernetes.api_server: refused over http, which shows the token to anybody; use "
                f"https, or an empty account"
            )
    if discover.api_key_env and not _VARIABLE.fullmatch(discover.api_key_env):
        yield f"{key}.api_key_env: expected the name of an environment variable, got {discover.api_key_env!r}"
    for field in ("kv_events", "kv_replay"):
        if isinstance(address := getattr(discover, field), str) and address:
            yield f"{key}.{field}: expected the port alone, on the host that is found, got {address!r}"
    if discover.kv_replay and not discover.kv_events:
        yield f"{key}.kv_replay: of no use without {key}.kv_events"


def _worker_problems(worker: WorkerConfig, key: str) -> Iterator[str]:
    own = worker.engine == "penstock"
    if own and not _OWN.fullmatch(worker.url):
        yield f"{key}.url: engine penstock listens at unix:/PATH or tcp:HOST:PORT, got {worker.url!r}"
    elif not own and not _HTTP.fullmatch(worker.url):
        yield f"{key}.url: expected http://HOST:PORT or https://HOST/PATH, got {worker.url!r}"
    elif (port := re.search(r":([0-9]+)(/|$)", worker.url.partition("://")[2] or worker.url)) and not (
        0 < int(port[1]) <= 65_535
    ):
        yield f"{key}.url: expected a port from 1 to 65535, got {port[1]}"
    if worker.api_key_env and not _VARIABLE.fullmatch(worker.api_key_env):
        yield f"{key}.api_key_env: expected the name of an environment variable, got {worker.api_key_env!r}"
    if worker.kv_replay and not worker.kv_events:
        yield f"{key}.kv_replay: of no use without {key}.kv_events"
