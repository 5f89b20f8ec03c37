"""Structured output and a forced call on a real vLLM, through our own backend: what comes back obeys its
schema.
"""

import asyncio
import json
from pathlib import Path

import pytest
import uvloop
from conformance import Recorder
from engine_stand_ins import until
from test_external_conformance import tools

from penstock.backends.base import GenerateRequest
from penstock.backends.http.backend import ExternalWorker
from penstock.backends.http.external import make_backend
from penstock.config.flow import LimitsConfig
from penstock.protocol.needs import constraint_of, rare_needs
from penstock.protocol.openai_validate import parse_chat
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_formats import ForcedCalls
from penstock.text.tools import ParsedToolCall, joined
from penstock.types import RequestId, SamplingParams

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]
POINT = {
    "type": "object", "properties": {"x": {"enum": [3, 4]}, "on": {"type": "boolean"}},
    "required": ["x", "on"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "place", "parameters": POINT}}]
ASKED = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
    "choice": {"structured_outputs": {"choice": ["left", "right"]}},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "place"}}},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}


def test_what_comes_back_obeys_its_schema(vllm_url: str, model_28m: Path) -> None:
    """The weights are made up, so nothing but the schema shapes the text: drawn, for the likeliest token may
    be white space for ever.
    """

    async def run() -> dict[str, str]:
        tokenizer = Tokenizer.load(model_28m)
        backend = make_backend(
            ExternalWorker(engine="vllm", url=vllm_url, model="served"), tokenizer, tools()
        )
        backend.open()
        found: dict[str, str] = {}
        try:
            await until(lambda: backend.status.ready, timeout_s=60)
            for name, fields in ASKED.items():
                body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
                request = parse_chat(json.dumps(body).encode(), LimitsConfig())
                assert {need.capability for need in rare_needs(request)} <= backend.status.capabilities
                recorder = Recorder()
                backend.generate(
                    GenerateRequest(
                        request_id=RequestId(name),
                        prompt_token_ids=tokenizer.encode("Where?"),
                        sampling=SamplingParams(
                            temperature=1.0, seed=7, max_tokens=400, stop_token_ids=tuple(tokenizer.eos_ids)
                        ),
                        constraint=constraint_of(request),
                    ),
                    recorder,
                )
                finish = await recorder.end()
                assert finish.error is None, finish.error
                found[name] = recorder.text
        finally:
            await backend.close()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run())
    point = json.loads(found["schema"])
    assert point.keys() == POINT["properties"].keys()
    assert point["x"] in (3, 4)
    assert found["choice"] in ("left", "right")
    for name, parser in (("named", ForcedCalls("place")), ("required", ForcedCalls(""))):
        (call,) = joined([*parser.push(found[name]), *parser.finish()])
        assert isinstance(call, ParsedToolCall)
        assert call.name == "place"
        assert json.loads(call.arguments_json)["x"] in (3, 4)
