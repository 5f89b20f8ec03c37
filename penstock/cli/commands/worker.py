"""`penstock worker`: one engine worker at an address, for gateways on this machine or others."""

import argparse
import asyncio
import os
import signal

import uvloop

from penstock import rng
from penstock.backends.base import BackendStatus, Phase
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerKey
from penstock.cli import console
from penstock.cli.flags import Commands, Help, number, size
from penstock.cli.wiring.progress import loading_display
from penstock.cli.wiring.signals import on_signal
from penstock.clock import Clock, SystemClock
from penstock.config.checkpoints import resolve, served_name
from penstock.config.engine_settings import EngineSettings
from penstock.config.machine import is_loopback
from penstock.config.tree import MODEL_LEN_MIN, ModelConfig
from penstock.errors import ConfigError
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import WorkerProcess, stderr_line
from penstock.fleet.launchers.supervised import SupervisedWorker
from penstock.models.registry import check_loads
from penstock.protocol.address import (
    KEY_BYTES_MIN,
    NONCE_BYTES,
    Address,
    TcpAddress,
    WorkerLaunch,
    hash_key_of,
    parse_address,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types import ModelName, WorkerId

KEY_VARIABLE = "PENSTOCK_WORKER_KEY"

DESCRIPTION = """\
Run one worker of our engine at an address, for gateways that name it under models[].workers.
It is restarted when it crashes, and lets streams end before it stops."""

EPILOG = """\
environment:
  PENSTOCK_WORKER_KEY    what gateways must have to connect (16 bytes or more); needed where
                         other machines can reach the address

On the gateway, with the same variable:
  models:
    - path: ./Qwen3-0.6B
      replicas: 0
      workers:
        - {url: "tcp:10.0.0.7:9100", engine: penstock, api_key_env: PENSTOCK_WORKER_KEY}

exit code: 0 stopped cleanly, 1 it could not serve, 2 wrong usage or configuration

examples:
  penstock worker penstock-demo --listen tcp:127.0.0.1:9100
  PENSTOCK_WORKER_KEY=... penstock worker ./Qwen3-0.6B --listen tcp:0.0.0.0:9100"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "worker",
        help="run one engine worker at an address",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="what to load, as for serve")
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="tcp:HOST:PORT or unix:/PATH")
    parser.add_argument(
        "--name", default="", help="what gateways call the model (default: last part of MODEL)"
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--kv-dtype", choices=("auto", "int8", "fp8"), default="auto")
    parser.add_argument("--speculation", metavar="HOW", default="off")
    parser.add_argument("--threads", type=number(int, 0, 4096), default=0, metavar="N", help="0: all cores")
    parser.add_argument("--max-model-len", type=number(int, 0, 100_000_000), default=0, metavar="N")
    parser.add_argument("--kv-memory", type=size, default=0, metavar="SIZE", help="such as 2GiB")
    parser.add_argument(
        "--kv-quota", type=number(float, 0.01, 1), default=1.0, metavar="X",
        help="share of the KV cache that one tenant may hold (default: 1, no quota)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-timeout", type=number(float, 0, 86_400), default=600.0, metavar="SECONDS",
        help="streams have so long to end (default: 600)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock worker`."""
    address = _address(args.listen)
    key = _key(address)
    if 0 < args.max_model_len < MODEL_LEN_MIN:
        raise ConfigError(
            f"--max-model-len: {args.max_model_len} leaves no room for a prompt and an answer; at least "
            f"{MODEL_LEN_MIN}"
        )
    model = ModelConfig(path=args.model, name=args.name)
    directory, name = resolve(model.path), ModelName(served_name(model))
    check_loads(directory)
    engine = EngineSettings(
        dtype=args.dtype,
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        speculation=args.speculation,
        threads=args.threads,
        max_model_len=args.max_model_len,
        kv_memory_bytes=args.kv_memory,
        kv_quota_fraction=args.kv_quota,
    )
    launch = WorkerLaunch(
        model_path=str(directory),
        model_name=name,
        address=str(address),
        hash_key=hash_key_of(key) if key else rng.fresh_key(),
        key=key,
        engine=engine,
    )
    spec = WorkerSpec(worker_id=WorkerId(name), model_path=str(directory), model_name=name, engine=engine)
    tokenizer = Tokenizer.load(directory)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(spec, launch, address, tokenizer, SystemClock(), args.drain_timeout))


async def _serve(
    spec: WorkerSpec,
    launch: WorkerLaunch,
    address: Address,
    tokenizer: Tokenizer,
    clock: Clock,
    drain_timeout_s: float,
) -> int:
    key = WorkerKey(launch.key, lambda: rng.fresh_key(NONCE_BYTES)) if launch.key else None
    backend = EngineBackend(tokenizer, clock, key=key)
    process = WorkerProcess(spec.worker_id, launch, address, {}, stderr_line)
    worker = SupervisedWorker(spec, backend, process, clock)
    stop, down = asyncio.Event(), asyncio.Event()
    backend.on_change = lambda: down.set() if backend.status.phase is Phase.DOWN else None
    with on_signal(signal.SIGTERM, stop.set), on_signal(signal.SIGINT, stop.set):
        worker.start()
        try:
            if not await _is_ready(worker, stop):
                return 0
            console.out().print(
                f"worker of {spec.model_name} ready at {address}", markup=False, soft_wrap=True
            )
            ends = [asyncio.ensure_future(each.wait()) for each in (stop, down)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            return 1 if down.is_set() else 0
        finally:
            await worker.stop(drain_timeout_s if stop.is_set() else 0.0)


async def _is_ready(worker: SupervisedWorker, stop: asyncio.Event) -> bool:
    """Wait for the model; False if it is to stop before that."""
    with loading_display(console.err()) as display:

        def show(status: BackendStatus) -> None:
            display.update(worker.spec.model_name, status)

        ready = asyncio.ensure_future(worker.wait_ready(show))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([ready, stopping], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
            return ready.done()
        finally:
            ready.cancel()
            stopping.cancel()


def _address(text: str) -> Address:
    try:
        return parse_address(text.replace("tcp://", "tcp:"))
    except ValueError as error:
        raise ConfigError(f"--listen: {error}") from None


def _key(address: Address) -> bytes:
    key = os.environ.get(KEY_VARIABLE, "").strip().encode()
    if key and len(key) < KEY_BYTES_MIN:
        raise ConfigError(f"{KEY_VARIABLE}: shorter than {KEY_BYTES_MIN} bytes")
    if not key and isinstance(address, TcpAddress) and not is_loopback(address.host):
        raise ConfigError(f"{KEY_VARIABLE}: needed because other machines can reach {address}")
    return key
