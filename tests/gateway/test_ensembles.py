"""The process of an ensemble's steps: whose turn it is, and what ends it."""

import asyncio

import pytest

from penstock.config.routing import EnsembleConfig
from penstock.errors import ConfigError, EnsembleFailed, Overloaded
from penstock.gateway.api import ensembles as steps_module
from penstock.gateway.api.ensembles import StepProcess, Turns


def test_tenants_take_turns() -> None:
    async def play() -> list[str]:
        turns, order = Turns(), list[str]()

        async def call(tenant: str) -> None:
            await turns.take(tenant)
            order.append(tenant)
            turns.give_back()

        await turns.take("first")
        tasks = [asyncio.ensure_future(call(tenant)) for tenant in ("many", "many", "many", "one", "other")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        turns.give_back()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.take("last")
        turns.give_back()
        return order

    assert asyncio.run(play()) == ["many", "one", "other", "many"]


def test_too_many_of_one_tenant_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "WAITING_MAX_BY_TENANT", 2)

    async def play() -> None:
        turns = Turns()
        await turns.take("a")
        waiting = [asyncio.ensure_future(turns.take(tenant)) for tenant in ("a", "a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="Too many requests wait"):
            await turns.take("a")
        for _ in waiting:
            turns.give_back()
        await asyncio.gather(*waiting)

    asyncio.run(play())


def test_a_call_that_is_cancelled_leaves_a_process_that_answers_the_next() -> None:
    """An answer that nobody reads would be taken for the next call's."""

    async def play() -> None:
        steps = StepProcess(EnsembleConfig(name="e", model="m", before="operator:concat", after="time:sleep"))
        await steps.start()
        call = asyncio.ensure_future(steps.call("time:sleep", "", 3600))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await steps.call("operator:concat", "", "a", "b") == "ab"
        with pytest.raises(EnsembleFailed, match=r"'e' failed: operator:concat raised TypeError\."):
            await steps.call("operator:concat", "", 1, 2)
        assert await steps.call("operator:concat", "", [1], [2]) == [1, 2], "the process goes on"
        await steps.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("json:nothing", "json:nothing cannot be imported: AttributeError"),
        ("math:pi", "math:pi cannot be imported: TypeError: math:pi is no function"),
    ],
)
def test_steps_that_are_not_there(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"ensembles: e: {words}"):
        asyncio.run(StepProcess(EnsembleConfig(name="e", model="m", before=entry)).start())
