import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.gpu.graphs import Buckets, GraphCache, GraphLimits, StepKind, decode_sizes, powers
from penstock.engine.gpu.platform import CpuPlatform, Graph, Staging


def limits(**changes: int) -> GraphLimits:
    settings = {"max_running": 64, "tokens_max": 256, "count_max": 8, "memory_bytes_max": 1000} | changes
    return GraphLimits(**settings)


def decode(rows: int, *, draws: bool = True) -> StepKind:
    return StepKind(rows, rows, decode_only=True, draws=draws)


def mixed(tokens: int, samples: int) -> StepKind:
    return StepKind(tokens, samples, decode_only=False, draws=samples > 0)


class Recorded(CpuPlatform):
    """Notes what is captured and counts memory."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.captured = 0
        self._bytes_each = bytes_each

    def capture(self, run: object) -> Graph:
        self.captured += 1
        return super().capture(run)

    def reserved_bytes(self) -> int:
        return self.captured * self._bytes_each


def cache(platform: Recorded, **changes: int) -> tuple[GraphCache, list[StepKind]]:
    ran: list[StepKind] = []
    return GraphCache(platform, limits(**changes), ran.append), ran


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 600), st.data())
def test_a_bucket_holds_the_step_and_never_more_than_the_buffers(
    max_running: int, tokens: int, tokens_max: int, data: st.DataObject
) -> None:
    tokens_max = max(tokens_max, max_running)  # A step has room for every row.
    samples = data.draw(st.integers(0, min(tokens, max_running)))
    decode_only = samples == tokens and data.draw(st.booleans())
    step = StepKind(tokens, samples, decode_only, draws=samples > 0)
    bucket = Buckets(limits(max_running=max_running, tokens_max=tokens_max)).fit(step)
    if bucket is None:
        assert tokens > tokens_max
        return
    assert bucket.tokens >= tokens
    assert bucket.samples >= samples
    assert bucket.samples <= max_running
    assert bucket.tokens <= max(tokens_max, max_running)
    assert (bucket.decode_only, bucket.draws) == (decode_only, step.draws)
    if decode_only:
        assert bucket.tokens == bucket.samples
        assert bucket.tokens <= max(1.26 * tokens, tokens + 8)


def test_sizes() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(5) == (1, 2, 4, 5)
    assert decode_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert powers(16, 100) == (16, 32, 64, 100)
    assert powers(16, 7) == (7,)


def test_a_graph_is_captured_at_the_third_use() -> None:
    platform = Recorded()
    graphs, ran = cache(platform)
    for uses in range(1, 5):
        assert graphs.launch(decode(3)) == decode(4)
        assert len(ran) == uses
        assert platform.captured == (uses >= 3)
    assert graphs.replays == 2
    assert set(ran) == {decode(4)}


def test_steps_that_differ_in_what_they_do_have_graphs_of_their_own() -> None:
    graphs, ran = cache(Recorded())
    steps = [decode(4), decode(4, draws=False), mixed(4, 4), mixed(4, 0)]
    assert len({graphs.launch(step) for step in steps}) == 4
    assert ran == [decode(4), decode(4, draws=False), mixed(16, 8), mixed(16, 0)]


def test_large_steps_are_neither_padded_nor_captured() -> None:
    platform = Recorded()
    graphs, ran = cache(platform)
    for _ in range(5):
        assert graphs.launch(mixed(300, 3)) == mixed(300, 3)
    assert ran == [mixed(300, 3)] * 5
    assert platform.captured == 0


def test_number_and_memory_of_graphs_are_bounded() -> None:
    for changes, bytes_each, expected in (
        ({"count_max": 2}, 0, 2),
        ({}, 400, 3),
        ({"count_max": 0}, 0, 0),
    ):
        platform = Recorded(bytes_each)
        graphs, _ = cache(platform, **changes)
        for rows in (1, 2, 4, 8, 16):
            for _ in range(4):
                graphs.launch(decode(rows))
        assert platform.captured == len(graphs) == expected


def test_without_graphs_nothing_is_padded() -> None:
    graphs, ran = cache(Recorded(), count_max=0)
    assert graphs.launch(decode(3)) == decode(3)
    assert ran == [decode(3)]


def test_idle_time_takes_the_largest_first() -> None:
    platform = Recorded()
    graphs, ran = cache(platform)
    for step in (decode(2), mixed(100, 2), decode(30)):
        graphs.launch(step)
    ran.clear()
    assert graphs.capture_next()
    graphs.launch(mixed(100, 2))
    assert (graphs.replays, platform.captured) == (1, 1)
    assert graphs.capture_next()
    assert graphs.capture_next()
    assert not graphs.capture_next()


def test_warming_captures_at_once_and_only_once() -> None:
    platform = Recorded()
    graphs, ran = cache(platform)
    assert graphs.decode_steps()[0] == decode(64)
    for _ in range(2):
        graphs.warm(decode(64))
    assert (ran, platform.captured) == ([decode(64)], 1)


def test_staging_keeps_values_of_any_type_and_overflows_into_ordinary_memory() -> None:
    staging = Staging(CpuPlatform(), words=16)
    values = [
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([0.1, -2.5], dtype=torch.float64),
        torch.tensor([1 << 40], dtype=torch.int64),
        torch.tensor([0.25, 3.0, 4.0, 5.0, 6.0], dtype=torch.float32),  # Does not fit any more.
        torch.tensor([7], dtype=torch.int32),
    ]
    for _ in range(2):
        staging.clear()
        for expected, found in zip(values, [staging.put(one.numpy()) for one in values], strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
