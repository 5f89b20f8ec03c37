"""Our gateway in front of a worker that runs already: python bench/relay/gateway.py SOCKET PORT [FEATURES]
[PROFILE].

Its caller is a tenant whose tier has every limit there is, all of them too large to be reached: requests and
tokens per minute, requests at once, prompt, answer and context, a daily and a monthly budget, prices, a
weight and a band; its key is stored as a hash. The ledger, the access log, metrics and admission are on, as
`serve` has them.

FEATURES is "all" (everything on), "bare" (everything off), or names of what is switched off, joined by "+":

    auth      nobody is asked who they are, so there is no tenant, and no limits and budgets either
    limits    all limits of the tier
    budget    budgets and the price list
    ledger    no journal, no database
    access    no line per request
    metrics   the product has no such switch: here the counters are objects that do nothing

The ledger lies in PENSTOCK_STATE_DIR, else in a directory that is gone afterwards; never in the user's own.
With PROFILE the profile of the process is written there at SIGTERM.
"""

import asyncio
import cProfile
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from penstock import __version__, gc_tuning, rng
from penstock.backends.engine.backend import EngineBackend
from penstock.cli.wiring.models import make_part
from penstock.clock import SystemClock
from penstock.config.flow import LimitsConfig
from penstock.config.ledger import LedgerConfig, ModelPrice, PricesConfig
from penstock.config.routing import AdmissionConfig
from penstock.config.tenancy import TierConfig
from penstock.config.tree import AuthConfig, Config, LogConfig, ModelConfig, ServerConfig
from penstock.fleet.registry import Registry
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.identity.api_keys import ApiKey, digest_of, edit_keys
from penstock.protocol.address import UnixAddress
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import WorkerId

KEY = "sk-benchbenchbe_0123456789abcdef0123456789abcdef0123456789a"
FEATURES = ("auth", "limits", "budget", "ledger", "access", "metrics")
LIMITED = TierConfig(
    name="limited",
    requests_per_minute=100_000_000,
    tokens_per_minute=10_000_000_000,
    concurrent_max=100_000,
    output_tokens_max=100_000,
    context_tokens_max=200_000,
    weight=4.0,
    band="priority",
)
BUDGETS = {"budget_per_day": 1e8, "budget_per_month": 1e9}
PRICES = PricesConfig(
    models=(ModelPrice(model="*", input=0.5, cached_input=0.1, output=1.5),),
    accelerators={"*": 2.0},
)


class Uncounted:
    """Stands for `Metrics` and everything in it, and counts nothing."""

    def __getattr__(self, name: str) -> "Uncounted":
        return self

    def __call__(self, *args: object, **named: object) -> "Uncounted":
        return self


def features_off(names: str) -> frozenset[str]:
    """The features that "all" (nothing), "bare" (all of it) or names joined by "+" switch off."""
    off = frozenset(FEATURES) if names == "bare" else frozenset(names.split("+")) - {"all"}
    if unknown := off - frozenset(FEATURES):
        sys.exit(f"no such feature: {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}")
    return off


def config_of(off: frozenset[str], port: int, place: Path) -> Config:
    """The measured configuration. Writes the file of hashed keys into `place`."""
    limits: dict[str, Any] = {"name": "limited", "weight": LIMITED.weight, "band": LIMITED.band}
    if "limits" not in off:
        limits = {name: getattr(LIMITED, name) for name in TierConfig.__struct_fields__}
    if "budget" not in off:
        limits |= BUDGETS
    keys = place / "keys"
    record = ApiKey(
        id=KEY[3:15], hash=digest_of(KEY.encode()).hex(), tenant="bench", tier="limited", created_s=1
    )
    edit_keys(keys, lambda _: ([record], None))
    return Config(
        models=(ModelConfig(path="penstock-demo-mini", name="m"),),
        server=ServerConfig(port=port),
        # Loads are what was asked for: nothing is refused because it would be late.
        admission=AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=()),
        limits=LimitsConfig(concurrent_max=20_000),
        tiers=(TierConfig(**limits),),
        auth=AuthConfig(disabled=True) if "auth" in off else AuthConfig(keys_file=str(keys)),
        prices=PricesConfig() if "budget" in off else PRICES,
        ledger=LedgerConfig(enabled="ledger" not in off, directory=str(place / "ledger")),
        log=LogConfig(access="access" not in off),
    )


async def _main(paths: list[str], config: Config, *, counted: bool) -> None:
    clock = SystemClock()
    log = Log(config.log, clock, stream=sys.stderr, secrets=(KEY,))
    registry = Registry(clock, log, workers_max=len(paths))
    part = make_part(config.models[0], registry, clock)
    for number, path in enumerate(paths):
        backend = EngineBackend(part.served.tokenizer, clock)
        backend.connect_to(UnixAddress(path))
        worker = registry.new(WorkerId(f"m-{number}"), part.served.name, backend)
        worker.shares_key = True  # As one that the gateway has launched: prompts are known by its own keys.
        registry.add(worker)
    metrics: Any = Metrics([part.served.name], version=__version__) if counted else Uncounted()
    gateway = Gateway(
        config,
        {part.served.name: part.served},
        registry,
        GatewayTools(metrics=metrics, clock=clock, ids=rng.IdSource(), log=log),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await gateway.start()
    gc_tuning.tune_server()
    await stop.wait()
    await gateway.stop()


def main() -> None:
    """Serve until SIGTERM."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    path, port, off = sys.argv[1], int(sys.argv[2]), features_off((*sys.argv, "all")[3])
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        place = Path(os.environ.get("PENSTOCK_STATE_DIR") or name)
        place.mkdir(parents=True, exist_ok=True)
        work = _main([path], config_of(off, port, place), counted="metrics" not in off)
        if len(sys.argv) > 4:
            profile = cProfile.Profile(time.thread_time)
            profile.runcall(uvloop.run, work)
            profile.dump_stats(sys.argv[4])
        else:
            uvloop.run(work)


if __name__ == "__main__":
    main()
