"""Our gateway in front of a worker that runs already: python bench/relay/gateway.py SOCKET PORT FEATURES [PROFILE].

FEATURES is "all" (as `serve` has it) or names of what is switched off, with commas: "access" (the access log), "auth".
With PROFILE the profile of the process is written there at SIGTERM.
"""

import asyncio
import cProfile
import resource
import signal
import sys
import time

import uvloop

from penstock import __version__, collector, rng
from penstock.backends.own import OwnBackend
from penstock.cli.models import make_part
from penstock.clock import SystemClock
from penstock.config.tree import AuthConfig, Config, LogConfig, ModelConfig, ServerConfig
from penstock.fleet.registry import Registry
from penstock.gateway.app import Gateway
from penstock.protocol.address import UnixAddress
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import WorkerId

KEY = "sk-bench-0123456789abcdef"


async def _main(path: str, port: int, off: set[str]) -> None:
    clock = SystemClock()
    config = Config(
        models=(ModelConfig(path="penstock-demo-mini", name="m"),),
        server=ServerConfig(port=port),
        auth=AuthConfig(disabled=True) if "auth" in off else AuthConfig(keys=(KEY,)),
        log=LogConfig(access="access" not in off),
    )
    log = Log(config.log, clock, stream=sys.stderr, secrets=config.auth.keys)
    registry = Registry(clock, log, workers_max=1)
    part = make_part(config.models[0], registry, clock)
    backend = OwnBackend(part.served.tokenizer, clock)
    backend.connect_to(UnixAddress(path))
    registry.add(registry.new(WorkerId("m-0"), part.served.name, backend))
    gateway = Gateway(
        config,
        {part.served.name: part.served},
        registry,
        metrics=Metrics([part.served.name], version=__version__),
        clock=clock,
        ids=rng.IdSource(),
        log=log,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await gateway.start()
    collector.settle()
    await stop.wait()


if __name__ == "__main__":
    _, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))
    _work = _main(sys.argv[1], int(sys.argv[2]), set(sys.argv[3].split(",")))
    if len(sys.argv) > 4:
        _profile = cProfile.Profile(time.thread_time)
        _profile.runcall(uvloop.run, _work)
        _profile.dump_stats(sys.argv[4])
    else:
        uvloop.run(_work)
