"""Two real worker processes behind a gateway: one is killed or stopped in the middle of an answer, and nobody
notices.
"""

import io
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import openai
import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from fleets import fleet_of
from scripted_worker import bench

from penstock.backends.silence import HeartbeatTerms
from penstock.clock import SystemClock
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import AuthConfig, Config, LogConfig, ServerConfig
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.models.served import ServedModel
from penstock.rng import IdSource
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.types import ModelName

KEY = "sk-test-key-0123456789"
ASKED = {
    "model": "scripted",
    "prompt": "hello",
    "max_tokens": 300,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PARAMETERS = (
    {"temperature": 0.0, "seed": 3},
    {"temperature": 0.9, "seed": 5, "logprobs": 2, "stop": ["zzzz"]},
)


async def answer(client: openai.AsyncOpenAI, parameters: dict, *, after: int = 0, then=None) -> list:
    """Every chunk of a streamed answer, less its id; `then` is called once so many are here."""
    chunks = []
    stream = await client.completions.create(**ASKED, **parameters)
    async for chunk in stream:
        chunks.append((chunk.choices, chunk.usage))
        if len(chunks) == after:
            then()
    return chunks


def summed(chunks: list) -> tuple:
    """What an answer says, however it was cut into chunks."""
    choices = [choice for each, _ in chunks for choice in each]
    logprobs = [found for choice in choices if choice.logprobs for found in choice.logprobs.token_logprobs]
    return (
        "".join(choice.text for choice in choices),
        logprobs,
        [choice.finish_reason for choice in choices if choice.finish_reason],
        [(usage.prompt_tokens, usage.completion_tokens) for _, usage in chunks if usage],
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_lost_in_mid_stream_is_noticed_by_nobody(how: signal.Signals, tmp_path: Path) -> None:
    async def main() -> None:
        async with bench() as made:
            made.heartbeat = HeartbeatTerms(interval_s=0.25)
            clock, log = SystemClock(), Log(LogConfig(), SystemClock(), stream=io.StringIO())
            workers = [await made.start() for _ in range(2)]
            for worker in workers:
                await worker.wait_ready()
            registry = fleet_of(clock, {"scripted": [worker.backend for worker in workers]}, log=log)
            model = ServedModel(
                name=ModelName("scripted"),
                workers=registry.of("scripted"),
                tokenizer=byte_tokenizer(),
                template=ChatTemplate(
                    {"default": "{{ messages }}"}, special_tokens={}, wall_ns=clock.wall_ns
                ),
                created_s=0,
            )
            config = Config(
                server=ServerConfig(port=0),
                auth=AuthConfig(keys=(KEY,)),
                ledger=LedgerConfig(directory=str(tmp_path / "ledger")),
            )
            metrics = Metrics(["scripted"], version="test")
            tools = GatewayTools(metrics=metrics, clock=clock, ids=IdSource(seed=1), log=log)
            gateway = Gateway(config, {model.name: model}, registry, tools)
            host, port = await gateway.start()
            async with openai.AsyncOpenAI(
                base_url=f"http://{host}:{port}/v1", api_key=KEY, max_retries=0
            ) as client:
                calm = [summed(await answer(client, each)) for each in PARAMETERS]

                def lose_busiest() -> None:
                    busiest = max(workers, key=lambda worker: worker.backend.num_streams)
                    lost.append(busiest.pid)
                    os.kill(busiest.pid, how)

                for parameters, expected in zip(PARAMETERS, calm, strict=True):
                    lost: list[int] = []
                    got = summed(await answer(client, parameters, after=20, then=lose_busiest))
                    assert got == expected
                    if how is signal.SIGSTOP:  # What it says when it wakes up reaches nobody.
                        os.kill(lost[0], signal.SIGCONT)
                    for worker in workers:
                        await worker.wait_ready()
            await gateway.stop()
            settled.append(gateway._policies.limits.limiter.settled)

    settled: list[int] = []
    uvloop.run(main())
    with closing(sqlite3.connect(tmp_path / "ledger" / "usage.sqlite")) as ledger:
        rows = ledger.execute("SELECT attempts, outcome FROM usage ORDER BY ended_ns").fetchall()
        (tokens,) = ledger.execute("SELECT sum(prompt_tokens + completion_tokens) FROM usage").fetchone()
    assert rows == [(1, "finished")] * 2 + [(2, "finished")] * 2
    assert settled == [tokens], "the limiter counts what the ledger has"
