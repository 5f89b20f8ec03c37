"""`penstock serve`: from flags to a running server, and back down again.

The effective configuration is made first: flag, else environment, else file, else default. Then the workers
begin, and only then the gateway is imported, so that models load meanwhile.
"""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import uvloop

from penstock.cli.flags import Commands, Help, number, size
from penstock.cli.wiring.signals import StopSignals
from penstock.clock import Clock, SystemClock
from penstock.config.checks import check
from penstock.config.engine_settings import share_of
from penstock.config.load import dump_config, load_config, with_environment
from penstock.config.tenancy import AuthConfig
from penstock.config.tree import MODEL_LEN_MIN, Config, EngineConfig, LogConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.fleet.launchers.process import Spares
from penstock.models.registry import check_local_models


def serve_until_stopped(
    config: Config, clock: Clock, started_ns: int, reread: Callable[[], Config], *, takes_over: bool = False
) -> int:
    """Serve until told to stop; the exit code.

    `reread` makes the configuration again from its source, for SIGHUP. With `takes_over` it replaces the
    server that runs on its port.

    Raises:
        OperatorError: the configuration or a model cannot be served.
        WorkerUnavailable: a worker does not come up.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, clock, started_ns, reread, takes_over=takes_over))


async def _serve(
    config: Config, clock: Clock, started_ns: int, reread: Callable[[], Config], *, takes_over: bool
) -> int:
    spares = Spares()
    with StopSignals() as signals:
        if signals.drain.is_set():
            return 0
        try:
            await spares.begin(early_threads(config))
            from penstock.cli.wiring.serving import Serving  # Takes as long as a worker's imports.

            serving = Serving(config, clock, started_ns, reread, spares, takes_over=takes_over)
            return await serving.run(signals)
        finally:
            await spares.close()


def early_threads(config: Config) -> list[int]:
    """The threads of each worker that is worth beginning early: those of this machine, and no more than it
    has cores.
    """
    cores = len(os.sched_getaffinity(0))
    if config.fleet.launcher != "local":
        return []
    threads = [
        share_of(model.engine, model.replicas, cores).threads
        for model in config.models
        for _ in range(model.replicas)
    ]
    return threads[:cores]


HIDDEN = "hidden"


def effective_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """Put the sources together and check what can only be checked on the whole.

    Raises:
        ConfigError: a wrong file, variable or combination; the message names it.
    """
    config = load_config(Path(args.config)) if args.config else Config()
    config = with_environment(config, environ)
    config = msgspec.structs.replace(
        config,
        models=_models(args, config.models),
        server=msgspec.structs.replace(
            config.server, **_given(host=args.host, port=args.port, processes=args.processes)
        ),
        auth=_auth(args, config.auth),
        log=msgspec.structs.replace(config.log, **_given(level=args.log_level)),
    )
    check(config)
    return config


def _given(**flags: object) -> dict[str, object]:
    """The flags that were given."""
    return {name: value for name, value in flags.items() if value is not None}


def _models(args: argparse.Namespace, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    """MODEL replaces the file's models; engine flags count for every model."""
    if args.model:
        models = (ModelConfig(path=args.model),)
    if args.name:
        if len(models) != 1:
            raise ConfigError(f"--name names one model, but {len(models)} are served; name them in the file")
        models = (msgspec.structs.replace(models[0], name=args.name),)
    if args.lora:
        if len(models) != 1:
            raise ConfigError(
                f"--lora is of one model, but {len(models)} are served; use the file's adapters"
            )
        adapters = models[0].adapters | dict(map(_adapter, args.lora))
        models = (msgspec.structs.replace(models[0], adapters=adapters),)
    given = _given(
        dtype=args.dtype,
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        speculation=args.speculation,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        kv_memory_bytes=args.kv_memory,
        threads=args.threads,
    )

    def with_flags(engine: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(engine, **given)

    return tuple(msgspec.structs.replace(model, engine=with_flags(model.engine)) for model in models)


def _adapter(text: str) -> tuple[str, str]:
    name, mark, path = text.partition("=")
    if not (name and mark and path):
        raise ConfigError(f"--lora: expected NAME=PATH, got {text[:80]!r}")
    return name, path


def _auth(args: argparse.Namespace, auth: AuthConfig) -> AuthConfig:
    if args.no_auth and args.api_key:
        raise ConfigError("--no-auth and --api-key contradict each other")
    if args.no_auth:
        return msgspec.structs.replace(auth, keys=(), disabled=True)
    return msgspec.structs.replace(auth, keys=(args.api_key,)) if args.api_key else auth


def printable_config(config: Config) -> str:
    """The effective configuration as YAML; keys are secrets and are not shown."""
    auth = config.auth
    hidden = msgspec.structs.replace(
        auth,
        keys=(HIDDEN,) * len(auth.keys),
        admin_keys=(HIDDEN,) * len(auth.admin_keys),
        scrape_keys=(HIDDEN,) * len(auth.scrape_keys),
        secret=HIDDEN if auth.secret else "",
    )
    url = re.sub(r"(?<=://)[^/@]*(?=@)", HIDDEN, config.shared.url)
    shared = msgspec.structs.replace(config.shared, url=url)
    return dump_config(msgspec.structs.replace(config, auth=hidden, shared=shared))


def log_levels() -> tuple[str, ...]:
    """The values of --log-level, from the tree itself."""
    return get_args(get_type_hints(LogConfig)["level"])


DESCRIPTION = """\
Serve a model behind the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, with streaming.

MODEL is a Hugging Face model directory, a hub id, or the name of a built-in demo model; without
MODEL and without -c it is penstock-demo."""

EPILOG = """\
A flag counts before the environment, the environment before the file, the file before the default.

environment:
  PENSTOCK_API_KEY       the key that clients must send; without any, serve makes one and prints it
  PENSTOCK_KEYS_FILE     file of hashed keys (see `penstock keys`)
  PENSTOCK_ADMIN_KEY     the key of `penstock top` and `drain`; one that serve makes may do that too
  PENSTOCK_SCRAPE_KEY    a key for /metrics and /status.json alone
  PENSTOCK_AUTH_SECRET   secret of the tenants' caches, the same for all gateways of the same workers
  PENSTOCK_CELL          which of cells.all this server is (cells.here)
  PENSTOCK_CELL_KEY      the key that all cells share (cells.key_env)
  PENSTOCK_SHARED_URL    Redis that gateways share their rate limits through (shared.url)
  PENSTOCK_HOST, PENSTOCK_PORT

SIGHUP reads the configuration again (tenants, keys, prices, budgets, workers); streams continue.
SIGTERM: /ready says no, requests are served for server.lameduck_s more (Ctrl-C on loopback: not at all),
then running answers end; a second one gives them a last error event and stops at once.
While it starts or loads, either one stops it at once.
exit code: 0 stopped cleanly, 1 could not serve, 2 wrong configuration, 130 stopped at once

examples:
  penstock serve
  penstock serve ./Qwen3-0.6B --name qwen --port 9000
  penstock serve -c penstock.yaml --log-level debug
  penstock serve ./Qwen3-0.6B --kv-memory 2GiB --print-config > penstock.yaml"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve (default: penstock-demo)")
    parser.add_argument(
        "-c", dest="config", metavar="FILE", help="YAML configuration; --print-config shows every key"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration and exit"
    )
    levels = log_levels()
    parser.add_argument(
        "--log-level", choices=levels, metavar="LEVEL", help=f"{', '.join(levels)} (default: info)"
    )
    door = parser.add_argument_group("front door")
    door.add_argument("--host", help="address to listen on (default: 127.0.0.1); others need a key")
    door.add_argument(
        "--port", type=number(int, 0, 65_535), metavar="N", help="0 takes a free one (default: 8000)"
    )
    door.add_argument(
        "--processes",
        type=number(int, 1, 64),
        metavar="N",
        help="gateway processes that share the port (default: 1)",
    )
    door.add_argument(
        "--api-key", metavar="KEY", help="better: PENSTOCK_API_KEY (other users can read command lines)"
    )
    door.add_argument("--no-auth", action="store_true", help="let everybody in (loopback addresses only)")
    door.add_argument("--take-over", action="store_true", help="once ready, replace the serve on this port")
    _add_engine(parser)
    parser.set_defaults(run=run)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--name", help="what clients call the model (default: last part of MODEL)")
    engine.add_argument(
        "--lora",
        action="append",
        metavar="NAME=PATH",
        help="a LoRA adapter of the model, and what clients call it; may be given again",
    )
    engine.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="how to compute (default: auto)"
    )
    engine.add_argument(
        "--quantization",
        choices=("none", "int8", "int4"),
        help="round the weights while loading, for speed and memory (default: none)",
    )
    engine.add_argument(
        "--kv-dtype",
        choices=("auto", "int8", "fp8"),
        help="round the KV cache, for nearly twice the tokens in its memory: int8 on a CPU, fp8 on a GPU "
        "(default: auto)",
    )
    engine.add_argument(
        "--speculation",
        metavar="HOW",
        help="guess tokens ahead: off, ngram (from what the request has had before), or the directory of a "
        "smaller model with the same tokenizer, or of a head in EAGLE's layout (default: off)",
    )
    engine.add_argument(
        "--load-format",
        choices=("safetensors", "random"),
        help="random: make weights up from config.json, for benchmarks (default: safetensors)",
    )
    engine.add_argument(
        "--max-model-len",
        type=number(int, MODEL_LEN_MIN, 100_000_000),
        metavar="N",
        help="tokens of prompt and answer together, at least 2 (default: the model's limit)",
    )
    engine.add_argument(
        "--kv-memory",
        type=size,
        metavar="SIZE",
        help="memory for the KV cache, such as 2GiB (default: measured)",
    )
    engine.add_argument(
        "--threads", type=number(int, 1, 4096), metavar="N", help="CPU threads (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock serve`."""
    clock = SystemClock()
    started_ns = clock.now_ns()
    config = effective_config(args)
    if args.print_config:
        sys.stdout.write(printable_config(config))
        return 0
    check_local_models(config.models)

    return serve_until_stopped(
        config, clock, started_ns, lambda: effective_config(args), takes_over=args.take_over
    )
