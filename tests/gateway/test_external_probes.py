"""Probes of workers that are not ours, over HTTP: who is held against what, how rarely a provider is asked,
and what follows from a wrong answer.
"""

import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from engine_stand_ins import OpenAIStandIn, SglangStandIn, TgiStandIn, VllmStandIn, serving
from probed_workers import Probed
from test_external_conformance import opened

from penstock.gateway.dispatch.prober import PROVIDER_BEATS
from penstock.policy.resilience.anomalies import Standing
from penstock.policy.resilience.probes import PROMPT, TOKENS


class Damaged(VllmStandIn):
    """A vLLM whose log-probabilities are off, on demand; its text stays."""

    off = 0.0

    def logprobs(self, ids, limit, *, first_is_null):
        found = super().logprobs(ids, limit, first_is_null=first_is_null)
        tops = [{name: value - self.off for name, value in top.items()} for top in found["top_logprobs"]]
        return found | {"top_logprobs": tops}


@asynccontextmanager
async def probed(**servers):
    """`Probed`, with a worker for each stand-in by its engine's name."""
    async with AsyncExitStack() as stack:
        found, names = Probed(byte_tokenizer()), []
        for engine, server in servers.items():
            await stack.enter_async_context(serving(server))
            engine = engine.rstrip("0123456789")
            names.append(found.add(engine, await stack.enter_async_context(opened(engine, server))))
        yield found, names


def test_a_vllm_is_held_against_its_own_first_answer_and_left_alone_when_it_is_another():
    async def main():
        servers = [Damaged(), Damaged(), Damaged()]
        servers[2].off = 0.9  # Another quantization, say: it is right as it is.
        async with probed(**{f"vllm{i}": server for i, server in enumerate(servers)}) as (found, names):
            for _ in range(3):
                await found.beat()
            assert [found.verdict(name) for name in names] == ["right"] * 3
            asked = servers[0].requests[-1].json
            assert (asked["prompt"], asked["max_tokens"], asked["min_tokens"]) == (
                list(byte_tokenizer().encode(PROMPT, add_special_tokens=True)), TOKENS, TOKENS,
            )  # fmt: skip
            assert asked["temperature"] == 0.0
            assert asked["logprobs"] == 5
            salts = {request.json["cache_salt"] for server in servers for request in server.requests}
            assert len(salts) == 9, "what is cached would not be computed"
            servers[1].off = 2.5
            await found.beat()
            watched = found.anomalies.get(names[1])
            assert (watched.standing, watched.verdict) == (Standing.EJECTED, "wrong")
            assert [found.anomalies.weight(name) for name in names] == [1.0, 0.0, 1.0]
            page = found.metrics.render().decode()
            assert 'penstock_worker_weight_ratio{model="m",worker="m-1"} 0.0' in page
            assert 'penstock_anomalous_workers{cause="wrong",model="m"} 1.0' in page
            servers[1].off = 0.0
            for _ in range(6):
                await found.beat()
            assert found.anomalies.get(names[1]).standing is Standing.WELL

    uvloop.run(main())


def test_a_sglang_is_judged_too():
    async def main():
        async with probed(sglang=SglangStandIn()) as (found, (name,)):
            for _ in range(2):
                await found.beat()
            assert found.verdict(name) == "right"

    uvloop.run(main())


@pytest.mark.parametrize(
    ("engine", "server", "beats"), [("openai", OpenAIStandIn, PROVIDER_BEATS), ("tgi", TgiStandIn, 1)]
)
def test_who_promises_no_text_is_only_timed_and_a_provider_rarely(engine, server, beats):
    async def main():
        server_there = server()
        async with probed(**{engine: server_there}) as (found, (name,)):
            for _ in range(2 * beats):
                await found.beat()
            assert len(server_there.requests) == 2
            assert found.verdict(name) == "answered"
            assert found.anomalies.get(name).standing is Standing.WELL
            page = found.metrics.render().decode()
            assert re.search(r'penstock_probe_ttft_seconds{model="m",worker="m-0"} \d', page)
            assert 'penstock_probes_total{model="m",verdict="answered"} 2' in page
            assert "penstock_probe_logprob_distance{" not in page
            if engine == "openai":
                asked = server_there.requests[0].json
                assert asked["messages"] == [{"role": "user", "content": PROMPT}]
                assert (asked["max_tokens"], "temperature" in asked, "logprobs" in asked) == (
                    TOKENS, False, False,
                )  # fmt: skip

    uvloop.run(main())


def test_a_provider_that_refuses_is_not_blamed_for_it():
    async def main():
        server = OpenAIStandIn()
        server.faults.status = (429, {"retry-after": "7"}, b'{"error":{"message":"slow down"}}')
        async with probed(openai=server) as (found, (name,)):
            for _ in range(PROVIDER_BEATS):
                await found.beat()
            assert len(server.requests) == 1
            assert "slow down" in found.verdict(name)
            assert found.anomalies.weight(name) == 1.0
            assert 'verdict="none"} 1' in found.metrics.render().decode()

    uvloop.run(main())
