"""Clients that leave, in front of a real worker process: the engine stops at once and keeps nothing."""

import asyncio
import io

import uvloop
from byte_tokenizer import byte_tokenizer
from fleets import fleet_of
from raw_worker import Client
from scripted_worker import bench
from step_gate import StepGate

from penstock.clock import SystemClock
from penstock.config.tree import Config, ServerConfig
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.models.served import PublicPrefixes, ServedModel
from penstock.protocol.worker import Ping, Pong
from penstock.rng import IdSource
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.types import ModelName

NUM_CANCELS, AT_ONCE = 1000, 50
PROMPT_BLOCKS = 4


def make_gateway(kit, backend, log):
    config = kit.replace(
        Config(auth=kit.make_config().auth, server=ServerConfig(port=0, drain_timeout_s=0.5)),
        log={"access": False},
    )
    clock, tokenizer = SystemClock(), byte_tokenizer()
    registry = fleet_of(clock, {"tiny": backend})
    template = ChatTemplate({"default": "{{ messages }}"}, special_tokens={}, wall_ns=clock.wall_ns)
    model = ServedModel(
        name=ModelName("tiny"),
        workers=registry.of("tiny"),
        tokenizer=tokenizer,
        template=template,
        created_s=0,
        public_prefixes=PublicPrefixes.of((), tokenizer, template),
    )
    tools = GatewayTools(
        metrics=Metrics(["tiny"], version="test"),
        clock=clock,
        ids=IdSource(seed=1),
        log=Log(config.log, clock, stream=log),
    )
    return Gateway(config, {model.name: model}, registry, tools)


async def ask(kit, port, number):
    """Ask for a long answer and read its beginning."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = f"{number:06}" + "x" * (16 * PROMPT_BLOCKS)
    body = {"model": "tiny", "prompt": prompt, "stream": True, "max_tokens": 10_000, "ignore_eos": True}
    writer.write(kit.post("/v1/completions", body))
    await reader.readuntil(b"data: ")
    return writer


async def cancel(kit, port, number):
    """Ask for a long answer, read its beginning and leave."""
    writer = await ask(kit, port, number)
    writer.transport.abort()


async def idle_stats(backend, *, from_step=0):
    """What the worker says when it is idle, after that step."""
    while True:
        stats = backend.status.stats
        is_idle = stats and not stats.running + stats.waiting
        if not backend.num_streams and is_idle and stats.step >= from_step:
            return stats
        await asyncio.sleep(0.005)


def test_a_thousand_clients_that_leave_in_the_middle_leave_no_block_behind(kit):
    async def check():
        async with bench(0.0005) as made, asyncio.timeout(60):
            worker = await made.start(max_running=AT_ONCE)
            await worker.wait_ready()
            gateway = make_gateway(kit, worker.backend, io.StringIO())
            _, port = await gateway.start()
            for first in range(0, NUM_CANCELS, AT_ONCE):
                await asyncio.gather(*(cancel(kit, port, first + i) for i in range(AT_ONCE)))
            stats = await idle_stats(worker.backend)
            while stats.prompt_tokens < NUM_CANCELS * 16 * PROMPT_BLOCKS:  # It may be what it said before.
                await asyncio.sleep(0.005)
                stats = await idle_stats(worker.backend)
            assert stats.blocks_used == 0
            assert stats.generated_tokens < NUM_CANCELS * 1000, "nobody's answer was generated to its end"
            await gateway.stop()

    uvloop.run(check())


def test_the_step_that_runs_when_a_client_leaves_is_the_last(kit, tmp_path):
    """The gateway tells the worker at once, and does not wait for it; see also
    tests/engine_process/test_worker_process.py.
    """
    gate = StepGate(tmp_path)

    async def check():
        async with bench(gate=str(tmp_path)) as made, asyncio.timeout(60):
            worker = await made.start()
            await worker.wait_ready()
            gateway = make_gateway(kit, worker.backend, io.StringIO())
            _, port = await gateway.start()
            try:
                writer = await ask(kit, port, 1)
                gate.close()
                held = await asyncio.to_thread(gate.held_step)
                writer.transport.abort()
                while worker.backend.num_streams:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(have_received, worker.address)
                gate.open()
                stats = await idle_stats(worker.backend, from_step=held)
                assert (stats.step, stats.blocks_used) == (held, 0)
            finally:
                await gateway.stop()

    uvloop.run(check())


def have_received(address):
    """Return when the worker has read what was sent to it before, on whichever connection."""
    client = Client(address)
    for _ in range(2):  # The first may be read in one turn with what was sent before.
        client.send(Ping())
        client.until_kind(Pong)
    client.close()
