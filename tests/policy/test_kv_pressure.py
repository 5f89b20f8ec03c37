from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.queueing.kv_pressure import RunningStream, blocks_to_free, choose_victims


def stream_of(
    name: str, *, band: int = 0, left: int = 100, blocks: int = 10, protected: bool = False
) -> RunningStream:
    return RunningStream(
        id=name, band_order=band, is_protected=protected, remaining_tokens=left, blocks=blocks
    )


def test_lowest_band_first_then_the_longest_answer_to_come() -> None:
    streams = [
        stream_of("priority", band=-1, left=9000, protected=True),
        stream_of("default-long", left=800),
        stream_of("bulk-short", band=1, left=10),
        stream_of("bulk-long", band=1, left=500),
    ]
    assert choose_victims(streams, 40, victims_max=8) == ("bulk-long", "bulk-short", "default-long")
    assert choose_victims(streams, 11, victims_max=8) == ("bulk-long", "bulk-short")
    assert choose_victims(streams, 40, victims_max=1) == ("bulk-long",)
    assert choose_victims(streams, 0, victims_max=8) == ()


def test_what_gives_nothing_back_is_left_alone() -> None:
    assert choose_victims([stream_of("a", blocks=0), stream_of("b")], 1, victims_max=8) == ("b",)


def test_pressure_starts_above_one_bound_and_ends_below_another() -> None:
    assert blocks_to_free(95, 100, above=0.95, to=0.9) == 0
    assert blocks_to_free(96, 100, above=0.95, to=0.9) == 6
    assert blocks_to_free(0, 0, above=0.95, to=0.9) == 0


@given(
    streams=st.lists(
        st.builds(
            RunningStream,
            id=st.uuids().map(str),
            band_order=st.integers(-2, 2),
            is_protected=st.booleans(),
            remaining_tokens=st.integers(0, 1000),
            blocks=st.integers(0, 50),
        ),
        max_size=20,
        unique_by=lambda stream: stream.id,
    ),
    need=st.integers(0, 300),
    most=st.integers(1, 20),
)
def test_victims_of_any_streams(streams: list[RunningStream], need: int, most: int) -> None:
    chosen = choose_victims(streams, need, victims_max=most)
    assert chosen == choose_victims(reversed(streams), need, victims_max=most)
    by_id = {stream.id: stream for stream in streams}
    assert not any(by_id[name].is_protected for name in chosen)
    assert len(chosen) <= most
    if chosen:
        # Not one more than needed, and nobody of a lower band is spared.
        assert sum(by_id[name].blocks for name in chosen[:-1]) < need
        spared = [s for s in streams if s.id not in chosen and not s.is_protected and s.blocks]
        assert all(s.band_order <= min(by_id[name].band_order for name in chosen) for s in spared)
