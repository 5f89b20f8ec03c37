"""What is measured of a server, against an endpoint that plays a script."""

import asyncio

from scripted_endpoint import Script, StandIn

from bench.peers.figures import PREFIX
from bench.peers.measure import Gaps, Streams, gaps_around, level
from penstock.clock import NS_PER_MS, ManualClock


def stamped(*at_ms: int) -> Gaps:
    gaps = Gaps(ManualClock())
    gaps.stamps = [one * NS_PER_MS for one in at_ms]
    return gaps


def test_gaps_count_as_the_arrivals_from_the_one_that_spans_it():
    sinks = [stamped(0, 10, 20, 30, 70, 80, 90), stamped(5, 15, 25, 65)]
    before, during = gaps_around(sinks, 32 * NS_PER_MS, 75 * NS_PER_MS)
    assert before == [10 * NS_PER_MS] * 4
    assert [gap // NS_PER_MS for gap in during] == [10, 40, 40]


def test_pieces_that_arrive_together_are_one():
    clock = ManualClock()
    gaps, event = Gaps(clock), b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    gaps.on_bytes(event + event)
    clock.advance(NS_PER_MS // 10)
    gaps.on_bytes(event)
    clock.advance(2 * NS_PER_MS)
    gaps.on_bytes(event + b'data: {"choices":[{"delta":{}}]}\n\ndata: [DONE]\n\n')
    assert len(gaps.stamps) == 2


def test_a_server_is_measured_whole():
    async def run() -> None:
        async with StandIn(Script(gap_s=0.001)).listening() as url:
            figures, errors = await asyncio.to_thread(level, url, 2, 4, 1)
            assert errors == {}
            assert figures["c=2 tok/s"] > 0
            streams = Streams(url, "scripted", 1)
            figures |= await streams.prefix()
            assert min(figures["miss"], figures["hit"], figures[PREFIX]) > 0
            figures |= await streams.arrival()
            assert 0 < figures["gap p50 before"] <= figures["gap p99 before"]
            assert figures["gap p50 during"] <= figures["gap p99 during"] <= figures["gap most"]
            await streams.close()

    asyncio.run(run())
