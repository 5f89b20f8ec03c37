"""Makes the backend of a worker that is not ours: which dialect, which addresses, which key.

A new engine is a dialect (dialects/base.py), its names for its load (engine_metrics.py) and an entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.backends.http.backend import BackendDependencies, ExternalWorker, HttpBackend
from penstock.backends.http.client import HttpAddress, HttpClient
from penstock.backends.http.dialects.base import Dialect
from penstock.backends.http.dialects.openai import OpenAIDialect
from penstock.backends.http.dialects.sglang import SglangDialect
from penstock.backends.http.dialects.tgi import TgiDialect
from penstock.backends.http.dialects.triton import TritonDialect, TrtllmDialect
from penstock.backends.http.dialects.vllm import VllmDialect
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

PROVIDER_PROBE_S = 30.0
"""A provider counts how often it is asked."""
PROVIDER_CONTEXT = 128 * 1024
"""The context length assumed for a provider by default; it refuses longer prompts itself."""
_METRICS = {
    "vllm": "/metrics",
    "sglang": "/metrics",
    "tgi": "/metrics",
    "trtllm": "/prometheus/metrics",
    "triton": "/metrics",
}
_TRITON_METRICS_PORT = 8002
_MUST_SAY_CONTEXT = frozenset({"trtllm", "triton"})
"""Engines that do not tell how long their context is."""


def make_backend(worker: ExternalWorker, tokenizer: Tokenizer, tools: BackendDependencies) -> HttpBackend:
    """A backend for a worker; `open` it on the event loop. `tokenizer` is that of the model here.

    Raises:
        ConfigError: the address, the key or the engine cannot be used.
    """
    if worker.engine in _MUST_SAY_CONTEXT and not worker.max_model_len:
        raise ConfigError(
            f"{worker.url}: engine {worker.engine} does not tell its context: set max_model_len"
        )
    headers = {"authorization": f"Bearer {worker.api_key}"} if worker.api_key else {}
    address = _address(worker)
    client = HttpClient(address, tools.config.http, tools.clock, headers=headers)
    if worker.engine == "openai":
        worker = replace(worker, max_model_len=worker.max_model_len or PROVIDER_CONTEXT)
        slow = replace(tools.config, probe_s=max(tools.config.probe_s, PROVIDER_PROBE_S))
        tools = replace(tools, config=slow)
    metrics = _metrics(worker, address, client, tools)
    return HttpBackend(worker, tools, _dialect(worker, tokenizer), client, tokenizer, metrics=metrics)


def _address(worker: ExternalWorker) -> HttpAddress:
    """Operators write addresses with and without OpenAI's `/v1`: only a provider's is part of its address."""
    found = HttpAddress.parse(worker.url)
    if worker.engine == "openai":
        return found if found.base else replace(found, base="/v1")
    return replace(found, base=found.base.removesuffix("/v1"))


def _dialect(worker: ExternalWorker, tokenizer: Tokenizer) -> Dialect:
    model, has_priorities = worker.model, worker.has_priorities
    makers: Mapping[str, Callable[[], Dialect]] = {
        "openai": lambda: OpenAIDialect(model, tokenizer, max_model_len=worker.max_model_len),
        "vllm": lambda: VllmDialect(model, has_priorities=has_priorities),
        "sglang": lambda: SglangDialect(model, tokenizer, has_priorities=has_priorities),
        "trtllm": lambda: TrtllmDialect(model, has_priorities=has_priorities),
        "tgi": lambda: TgiDialect(tokenizer),
        "triton": lambda: TritonDialect(model, tokenizer),
    }
    if worker.engine not in makers:
        raise ConfigError(
            f"{worker.url}: unknown engine {worker.engine!r}; expected one of {', '.join(makers)}"
        )
    return makers[worker.engine]()


def _metrics(
    worker: ExternalWorker, address: HttpAddress, client: HttpClient, tools: BackendDependencies
) -> tuple[HttpClient, str] | None:
    """Where an engine's metrics are: at its own address, except where they have a port of their own."""
    if worker.metrics_url:
        at = HttpAddress.parse(worker.metrics_url)
        return HttpClient(replace(at, base=""), tools.config.http, tools.clock), at.base or "/metrics"
    path = _METRICS.get(worker.engine)
    if path is None:
        return None
    if worker.engine == "triton":
        return HttpClient(
            replace(address, port=_TRITON_METRICS_PORT, base=""), tools.config.http, tools.clock
        ), path
    return client, path
