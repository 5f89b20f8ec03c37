"""One of several gateway processes of a server (`server.processes`): `python -m penstock.cli.gateway_process`.

Started by cli/processes.py, which tells it everything on standard input. The end of that pipe means that the parent is
gone, and this process with it; SIGTERM drains it.
"""

import asyncio
import os
import signal
import socket
import sys

import msgspec
import uvloop

from penstock import __version__, rng
from penstock.cli.wire import make_part
from penstock.clock import SystemClock
from penstock.config.tree import Config
from penstock.gateway.app import Gateway
from penstock.gateway.siblings import Siblings
from penstock.protocol.address import parse_address
from penstock.protocol.siblings import ChildLaunch
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics

STDIN = 0
LAUNCH_BYTES_MAX = 16 * 1024 * 1024
EXIT_ORPHANED = 1


def main() -> int:
    """Serve until told to stop; the exit code."""
    launch = _read_launch()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(launch))


async def _serve(launch: ChildLaunch) -> int:
    config = msgspec.json.decode(launch.config, type=Config)
    clock = SystemClock()
    log = Log(config.log, clock, stream=sys.stderr, secrets=(*config.auth.keys, *config.auth.admin_keys))
    log.adopt("asyncio")
    parts = [make_part(model, clock) for model in config.models]
    names = [part.served.name for part in parts]
    gateway = Gateway(
        config,
        {part.served.name: part.served for part in parts},
        metrics=Metrics(names, version=__version__),
        clock=clock,
        ids=rng.IdSource(),
        log=log,
        listeners=[socket.socket(fileno=number) for number in launch.listeners],
        siblings=Siblings(launch.parent),
    )
    stop = asyncio.Event()
    parent = _Parent(gateway, stop)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(STDIN, parent.on_readable)
    for part, address in zip(parts, launch.workers, strict=True):
        part.backend.connect_to(parse_address(address))
    await gateway.start()
    await stop.wait()
    if parent.is_gone:
        return EXIT_ORPHANED
    await gateway.stop()
    for part in parts:
        await part.backend.drain(0.0)
    return 0


class _Parent:
    """Standard input after the launch: a line with each new configuration; its end is the parent's."""

    def __init__(self, gateway: Gateway, stop: asyncio.Event) -> None:
        self.is_gone = False
        self._gateway, self._stop = gateway, stop
        self._rest = b""
        self._reloads: set[asyncio.Task[bool]] = set()

    def on_readable(self) -> None:
        data = os.read(STDIN, 1 << 16)
        if not data or len(self._rest) > LAUNCH_BYTES_MAX:
            asyncio.get_running_loop().remove_reader(STDIN)
            self.is_gone = True
            self._stop.set()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            config = msgspec.json.decode(line, type=Config)
            task = asyncio.create_task(self._gateway.tenancy.reload(config))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)


def _read_launch() -> ChildLaunch:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(STDIN, 1 << 16)
        if not piece or len(line) > LAUNCH_BYTES_MAX:
            sys.exit(EXIT_ORPHANED)
        line += piece
    return msgspec.json.decode(line, type=ChildLaunch)


if __name__ == "__main__":
    sys.exit(main())
