"""Clients that leave, in front of a real worker process: the engine stops at once and keeps nothing."""

import asyncio
import io

import uvloop
from byte_tokenizer import byte_tokenizer
from fleets import fleet_of
from scripted_worker import bench

from penstock.clock import SystemClock
from penstock.config.tree import Config, ServerConfig
from penstock.gateway.app import Gateway
from penstock.gateway.models import ServedModel
from penstock.gateway.public import PublicPrefixes
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
    return Gateway(
        config,
        {model.name: model},
        registry,
        metrics=Metrics(["tiny"], version="test"),
        clock=clock,
        ids=IdSource(seed=1),
        log=Log(config.log, clock, stream=log),
    )


async def cancel(kit, port, number):
    """Ask for a long answer, read its beginning and leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = f"{number:06}" + "x" * (16 * PROMPT_BLOCKS)
    body = {"model": "tiny", "prompt": prompt, "stream": True, "max_tokens": 10_000, "ignore_eos": True}
    writer.write(kit.post("/v1/completions", body))
    await reader.readuntil(b"data: ")
    writer.transport.abort()


async def idle_stats(backend):
    while True:
        stats = backend.status.stats
        if not backend.num_streams and stats and not stats.running + stats.waiting:
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
            assert stats.blocks_used == 0
            assert stats.prompt_tokens >= NUM_CANCELS * 16 * PROMPT_BLOCKS
            assert stats.generated_tokens < NUM_CANCELS * 1000, "nobody's answer was generated to its end"
            # The step that runs when the abort arrives is the last that holds the blocks.
            await cancel(kit, port, NUM_CANCELS)
            before = worker.backend.progress
            assert (await idle_stats(worker.backend)).step <= before + 20
            await gateway.stop()

    uvloop.run(check())
