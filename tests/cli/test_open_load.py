"""The open-loop load of the overload tests against a scripted endpoint: what it offers and counts, and how
its clients behave.
"""

import asyncio
from collections import Counter

import overload
import pytest
from open_load import Asked, Kind, OpenLoad, Sender
from scripted_endpoint import Script, StandIn

from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.clock import NS_PER_MS, SystemClock
from penstock.config.routing import AdmissionConfig

SENDERS = (Sender("a", "priority", 0.3), Sender("b", "bulk", 0.7))
KINDS = (Kind("short", 3, 4, 0.5), Kind("long", 30, 8, 0.5))


def offer(
    script: Script, *, rate: float = 200, seconds: float = 0.5, drain_s: float = 5
) -> tuple[OpenLoad, StandIn]:
    async def main() -> tuple[OpenLoad, StandIn]:
        stand_in = StandIn(script)
        async with stand_in.listening() as url:
            limits = ClientLimits(request_timeout_s=10)
            clients = {each.name: Client(ApiAddress.parse(url), limits=limits) for each in SENDERS}
            load = OpenLoad(clients, "scripted", SENDERS, KINDS, SystemClock())
            await load.run("x", seed=1, rate=rate, seconds=seconds, drain_s=drain_s)
            for client in clients.values():
                await client.close()
            return load, stand_in

    return asyncio.run(main())


def test_it_offers_the_mix_at_its_own_times_whatever_is_answered() -> None:
    load, stand_in = offer(Script(first_s=0.2))
    assert len(load.asked) == len(stand_in.requests) == pytest.approx(100, abs=30)
    assert all(each.ok for each in load.asked)
    senders, kinds = (Counter(getattr(each, name).name for each in load.asked) for name in ("sender", "kind"))
    assert senders["b"] > senders["a"] > 10
    assert min(kinds["short"], kinds["long"]) > 25
    assert {each.tokens for each in load.asked} == {4, 8}
    assert min(each.ttft_ns for each in load.asked) >= 200 * NS_PER_MS
    prompts = [request["messages"][0]["content"] for request in stand_in.requests]
    assert len(set(prompts)) == len(prompts)


def test_who_is_refused_comes_back_when_told_and_its_time_counts_from_then() -> None:
    load, _ = offer(Script(refuse_status=429, refuse_first=5, retry_after_s=1), rate=20, seconds=2.5)
    again = [each for each in load.asked if each.refusals]
    assert len(again) == 5
    for each in again:
        assert (each.attempts, each.retry_after_s) == (2, 1)
        assert each.ok
        assert each.due_ns - each.first_due_ns >= 1000 * NS_PER_MS
        assert 0 < each.ttft_ns < 900 * NS_PER_MS


def test_what_is_open_at_the_end_is_cut_and_counted() -> None:
    load, _ = offer(Script(first_s=2), rate=50, seconds=0.2, drain_s=0.1)
    assert all(each.is_cut and not each.ok for each in load.asked)
    assert overload.drained_s(load) is None


def test_promises_are_those_of_the_band_and_of_the_machine() -> None:
    judge = overload.Judge(
        AdmissionConfig(), {"short": 10 * NS_PER_MS, "long": 400 * NS_PER_MS}, 40 * NS_PER_MS
    )
    short, long, bulk = (
        judge.promise(Asked(sender, kind, 0))
        for sender, kind in ((SENDERS[0], KINDS[0]), (SENDERS[0], KINDS[1]), (SENDERS[1], KINDS[0]))
    )
    assert (short.ttft_ns, long.ttft_ns, bulk.ttft_ns) == (
        500 * NS_PER_MS,
        1000 * NS_PER_MS,
        5000 * NS_PER_MS,
    )
    assert short.tpot_ns == 100 * NS_PER_MS
