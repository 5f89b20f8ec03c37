"""The effective configuration of `serve`: flag, else environment, else file, else default."""

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from penstock.config.checks import check
from penstock.config.load import dump_config, load_config, with_environment
from penstock.config.tenancy import AuthConfig
from penstock.config.tree import Config, EngineConfig, LogConfig, ModelConfig
from penstock.errors import ConfigError

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
    given = _given(
        dtype=args.dtype,
        quantization=args.quantization,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        kv_memory_bytes=args.kv_memory,
        threads=args.threads,
    )

    def with_flags(engine: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(engine, **given)

    return tuple(msgspec.structs.replace(model, engine=with_flags(model.engine)) for model in models)


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
    """What --log-level takes, from the tree itself."""
    return get_args(get_type_hints(LogConfig)["level"])
