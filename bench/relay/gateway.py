"""Our gateway in front of a worker that runs already: python bench/relay/gateway.py SOCKET PORT.

Its caller is a tenant whose tier has every limit there is, all of them too large to be reached: requests and
tokens per minute, requests at once, prompt, answer and context, a daily and a monthly budget, prices, a
weight and a band; its key is stored as a hash. The ledger, the access log, metrics and admission are on, as
`serve` has them. The ledger lies in PENSTOCK_STATE_DIR, else in a directory that is gone afterwards; never in
the user's own.
"""

import asyncio
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import uvloop

from penstock import __version__, gc_tuning, rng
from penstock.backends.engine.backend import EngineBackend
from penstock.cli.wiring.models import make_part
from penstock.clock import SystemClock
from penstock.config.flow import LimitsConfig
from penstock.config.ledger import LedgerConfig, ModelPrice, PricesConfig
from penstock.config.routing import AdmissionConfig
from penstock.config.tenancy import TierConfig
from penstock.config.tree import AuthConfig, Config, ModelConfig, ServerConfig
from penstock.fleet.registry import Registry
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.identity.api_keys import ApiKey, digest_of, edit_keys
from penstock.protocol.address import UnixAddress
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import WorkerId

KEY = "sk-benchbenchbe_0123456789abcdef0123456789abcdef0123456789a"
LIMITED = TierConfig(
    name="limited", requests_per_minute=100_000_000, tokens_per_minute=10_000_000_000, concurrent_max=100_000,
    output_tokens_max=100_000, context_tokens_max=200_000, weight=4.0, band="priority", budget_per_day=1e8,
    budget_per_month=1e9,
)  # fmt: skip
PRICES = PricesConfig(
    models=(ModelPrice(model="*", input=0.5, cached_input=0.1, output=1.5),), accelerators={"*": 2.0}
)


def config_of(port: int, place: Path) -> Config:
    """The measured configuration. Writes the file of hashed keys into `place`."""
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
        tiers=(LIMITED,),
        auth=AuthConfig(keys_file=str(keys)),
        prices=PRICES,
        ledger=LedgerConfig(directory=str(place / "ledger")),
    )


async def _main(path: str, config: Config) -> None:
    clock = SystemClock()
    log = Log(config.log, clock, stream=sys.stderr, secrets=(KEY,))
    registry = Registry(clock, log, workers_max=1)
    part = make_part(config.models[0], registry, clock)
    backend = EngineBackend(part.served.tokenizer, clock)
    backend.connect_to(UnixAddress(path))
    worker = registry.new(WorkerId("m-0"), part.served.name, backend)
    worker.shares_key = True  # As one that the gateway has launched: prompts are known by its own keys.
    registry.add(worker)
    metrics = Metrics([part.served.name], version=__version__)
    tools = GatewayTools(metrics=metrics, clock=clock, ids=rng.IdSource(), log=log)
    gateway = Gateway(config, {part.served.name: part.served}, registry, tools)
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
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        place = Path(os.environ.get("PENSTOCK_STATE_DIR") or name)
        place.mkdir(parents=True, exist_ok=True)
        uvloop.run(_main(sys.argv[1], config_of(int(sys.argv[2]), place)))


if __name__ == "__main__":
    main()
