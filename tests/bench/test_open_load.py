"""The load generator of bench/sockets/overload.py against a scripted endpoint: what it offers and counts, and
how its clients behave.
"""

import asyncio
from collections import Counter

import pytest
from scripted_endpoint import Script, StandIn

from bench.sockets import open_load, overload
from bench.sockets.open_load import Asked, Kind, OpenLoad, Sender
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.clock import NS_PER_MS, SystemClock
from penstock.config.routing import AdmissionConfig

SENDERS = (Sender("a", "priority", 0.3), Sender("b", "bulk", 0.7))
KINDS = (Kind("short", 3, 4, 0.5), Kind("long", 30, 8, 0.5))


def offer(
    script: Script, *, rate: float = 200, seconds: float = 0.5, manners: str = "leaves", drain_s: float = 5
) -> tuple[OpenLoad, StandIn]:
    async def main() -> tuple[OpenLoad, StandIn]:
        stand_in = StandIn(script)
        async with stand_in.listening() as url:
            limits = ClientLimits(request_timeout_s=10)
            clients = {each.name: Client(ApiAddress.parse(url), limits=limits) for each in SENDERS}
            load = OpenLoad(clients, "scripted", SENDERS, KINDS, SystemClock())
            await load.run("x", seed=1, rate=rate, seconds=seconds, manners=manners, drain_s=drain_s)
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


def test_who_leaves_takes_no_for_an_answer() -> None:
    load, stand_in = offer(Script(refuse_status=429, retry_after_s=1), seconds=0.3)
    assert all(
        (each.status, each.attempts, each.refusals, each.reported) == (429, 1, 1, 1) for each in load.asked
    )
    assert len(stand_in.requests) == len(load.asked)


def test_who_obeys_comes_back_when_told_and_its_time_counts_from_then() -> None:
    load, _ = offer(
        Script(refuse_status=429, refuse_first=5, retry_after_s=1), rate=20, seconds=2.5, manners="obeys"
    )
    again = [each for each in load.asked if each.refusals]
    assert len(again) == 5
    for each in again:
        assert (each.attempts, each.retry_after_s) == (2, 1)
        assert each.ok
        assert each.due_ns - each.first_due_ns >= 1000 * NS_PER_MS
        assert 0 < each.ttft_ns < 900 * NS_PER_MS


def test_who_hammers_comes_back_at_once_and_gives_up_in_the_end() -> None:
    load, stand_in = offer(
        Script(refuse_status=429, retry_after_s=9), rate=20, seconds=1.5, manners="hammers"
    )
    tries = Counter(each.attempts for each in load.asked)
    assert max(tries) == 1 + open_load.HAMMERED_MAX
    assert len(stand_in.requests) == sum(each.attempts for each in load.asked) > 2 * len(load.asked)


def test_what_is_open_at_the_end_is_cut_and_counted() -> None:
    load, _ = offer(Script(first_s=2), rate=50, seconds=0.2, drain_s=0.1)
    assert all(each.is_cut and not each.ok for each in load.asked)
    assert overload.drained_s(load) is None


def test_figures_tell_goodput_from_throughput() -> None:
    """An idle machine that takes 10 ms promises 500, and 5,000 in bulk: half of the answers come after
    6,000.
    """
    load, _ = offer(Script(), rate=100, seconds=1.0)
    late = load.asked[::2]
    for each in late:
        each.first_ns = each.due_ns + 6000 * NS_PER_MS
        each.last_ns = max(each.last_ns, each.first_ns)
    judge = overload.Judge(AdmissionConfig(), {"short": 10 * NS_PER_MS, "long": 10 * NS_PER_MS}, NS_PER_MS)
    found = overload.figures(load, judge, 100)
    assert found["goodput_rps"] < 0.7 * found["throughput_rps"]
    assert found["goodput_tps"] < found["throughput_tps"]
    assert sum(band["first_attempts"] for band in found["bands"].values()) == len(load.asked)
    assert sum(band["goodput_rps"] for band in found["bands"].values()) == pytest.approx(
        found["goodput_rps"], abs=0.01
    )
    assert found["good_of_offered"] == pytest.approx(0.5, abs=0.1)
    assert found["drain_s"] is not None


@pytest.mark.parametrize("beyond", [1.0, 0.5], ids=["holds", "falls"])
@pytest.mark.parametrize("begin", [2.0, 60.0], ids=["from below", "from above"])
def test_the_knee_is_where_nearly_all_that_is_offered_is_good(beyond: float, begin: float) -> None:
    """Of a server that can serve ten in time, whether or not its goodput holds behind that."""

    async def measure(rate: float) -> overload.Point:
        goodput = rate if rate <= 10 else 10 * beyond
        return overload.Point(rate, goodput / rate, goodput)

    assert 8.5 <= asyncio.run(overload.find_knee(measure, begin)) <= 10.6


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
