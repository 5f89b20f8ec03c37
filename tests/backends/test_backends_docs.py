"""docs/backends.md as it stands: its entries are read and served, its tables are those of the code."""

import asyncio
import re
from pathlib import Path

import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from conformance import Recorder, Requests
from engine_stand_ins import (
    OpenAIStandIn,
    SglangStandIn,
    StandIn,
    TgiStandIn,
    TritonStandIn,
    TrtllmStandIn,
    VllmStandIn,
    serving,
    text_of,
    until,
)
from test_external_conformance import tools

from penstock.backends.http.backend import ExternalWorker
from penstock.backends.http.engine_metrics import LOAD_NAMES
from penstock.backends.http.external import make_backend
from penstock.backends.http.terms import Anomaly
from penstock.config.checks import check
from penstock.config.fleet import WorkerConfig
from penstock.config.load import parse_config

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
ENTRIES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
STAND_INS: dict[str, type[StandIn]] = {
    "vllm": VllmStandIn,
    "sglang": SglangStandIn,
    "tgi": TgiStandIn,
    "trtllm": TrtllmStandIn,
    "triton": TritonStandIn,
    "openai": OpenAIStandIn,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_is_read_and_answers(entry: str) -> None:
    config = parse_config(entry)
    check(config)
    (worker,) = config.models[0].workers
    text = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with text as runner:
        assert runner.run(answer_of(worker)) == text_of(0, 5)


async def answer_of(config: WorkerConfig) -> str:
    """Of a stand-in at the entry's address, under the entry's name for the model."""
    server = STAND_INS[config.engine]()
    if config.engine != "triton":
        server.MODEL = config.served_model
    async with serving(server):
        worker = ExternalWorker(
            engine=config.engine, url=server.url, model=server.MODEL, max_model_len=config.max_model_len
        )
        backend = make_backend(worker, byte_tokenizer(), tools())
        backend.open()
        await until(lambda: backend.status.ready)
        recorder = Recorder()
        backend.generate(Requests().make(max_tokens=5), recorder)
        await recorder.end()
        await backend.close()
        return recorder.text


def test_the_page_has_an_entry_for_every_engine() -> None:
    engines = {worker.engine for entry in ENTRIES for worker in parse_config(entry).models[0].workers}
    assert engines == set(STAND_INS)


def test_the_page_names_every_metric() -> None:
    for engine, names in LOAD_NAMES.items():
        for group in (names.running, names.waiting, names.kv_usage):
            assert group is None or f"`{group[0]}`" in PAGE, engine
    assert f'kind="{Anomaly.USAGE_MISMATCH}"' in PAGE
