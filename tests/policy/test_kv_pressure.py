"""Which streams end at a worker whose KV memory is nearly full."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.flow import State
from penstock.policy.request import victims
from penstock.policy.terms import QueueTerms
from penstock.types import BLOCK_TOKENS

TOTAL, TO = 1000, 900


def stream_of(name, *, level=1, left=100, blocks=10, protected=False, state=State.STREAMING):
    """A request that holds so many blocks and has so much of its answer before it."""
    facts = SimpleNamespace(prompt_tokens=blocks * BLOCK_TOKENS, held_tokens=0)
    return SimpleNamespace(
        id=name, level=level, expected=left, completion_tokens=0, counted_cached_tokens=0, facts=facts,
        state=state, protected=protected,
    )  # fmt: skip


def ended(streams, need, *, limit=8, waiting=(0,), used=None):
    """Ids of those that end so that `need` blocks become free, while bands of these levels wait."""
    config = QueueTerms(shed_kv_above=TO / TOTAL, shed_kv_to=TO / TOTAL, shed_max=limit)
    queue = SimpleNamespace(
        bands=[SimpleNamespace(level=level, waiting=True) for level in waiting],
        band_of=lambda request: SimpleNamespace(config=SimpleNamespace(protected=request.protected)),
    )
    view = SimpleNamespace(kv_blocks_used=TO + need if used is None else used, kv_blocks_total=TOTAL)
    model_queue, worker = SimpleNamespace(queue=queue), SimpleNamespace(view=view)
    return [request.id for request in victims(config, model_queue, worker, streams)]


def test_lowest_band_first_then_the_longest_answer_to_come() -> None:
    streams = [
        stream_of("priority", level=1, left=9000, protected=True),
        stream_of("default-long", level=2, left=800),
        stream_of("bulk-short", level=3, left=10),
        stream_of("bulk-long", level=3, left=500),
    ]
    assert ended(streams, 40) == ["bulk-long", "bulk-short", "default-long"]
    assert ended(streams, 11) == ["bulk-long", "bulk-short"]
    assert ended(streams, 40, limit=1) == ["bulk-long"]
    assert ended(streams, 0) == []


def test_only_for_the_sake_of_a_higher_band() -> None:
    streams = [stream_of("a", level=2), stream_of("b", level=2)]
    assert ended(streams, 10, waiting=()) == ended(streams, 10, waiting=(2, 3)) == []
    assert ended([*streams, stream_of("high", level=1)], 10, waiting=()) == ["a"]


def test_what_gives_nothing_back_is_left_alone() -> None:
    assert ended([stream_of("a", blocks=0), stream_of("b")], 1) == ["b"]


def test_what_is_being_aborted_counts_as_free() -> None:
    stopping = stream_of("a", blocks=30, state=State.STOPPING)
    assert ended([stopping, stream_of("b")], 30) == []
    assert ended([stopping, stream_of("b")], 31) == ["b"]


@pytest.mark.parametrize(("used", "found"), [(950, []), (951, ["b", "a"])])
def test_pressure_starts_above_one_bound_and_ends_below_another(used: int, found: list[str]) -> None:
    config = QueueTerms(shed_kv_above=0.95, shed_kv_to=0.9, shed_max=8)
    queue = SimpleNamespace(
        bands=[SimpleNamespace(level=0, waiting=True)],
        band_of=lambda request: SimpleNamespace(config=SimpleNamespace(protected=False)),
    )
    view = SimpleNamespace(kv_blocks_used=used, kv_blocks_total=TOTAL)
    streams = [stream_of("a", left=1, blocks=26), stream_of("b", left=2, blocks=26)]
    chosen = victims(config, SimpleNamespace(queue=queue), SimpleNamespace(view=view), streams)
    assert [request.id for request in chosen] == found


@given(
    streams=st.lists(
        st.builds(
            stream_of,
            st.uuids().map(str),
            level=st.integers(1, 4),
            left=st.integers(0, 1000),
            blocks=st.integers(0, 50),
            protected=st.booleans(),
        ),
        max_size=20,
        unique_by=lambda stream: stream.id,
    ),
    need=st.integers(0, 300),
    limit=st.integers(1, 20),
)
def test_victims_of_any_streams(streams, need: int, limit: int) -> None:
    chosen = ended(streams, need, limit=limit, used=TO + need)
    assert chosen == ended(list(reversed(streams)), need, limit=limit)
    by_id = {stream.id: stream for stream in streams}
    assert not any(by_id[name].protected for name in chosen)
    assert len(chosen) <= limit
    if chosen:
        # Not one more than needed, and none of a lower band is spared.
        blocks = {stream.id: stream.facts.prompt_tokens // BLOCK_TOKENS for stream in streams}
        assert sum(blocks[name] for name in chosen[:-1]) < need
        spared = [s for s in streams if s.id not in chosen and not s.protected and blocks[s.id]]
        assert all(s.level <= min(by_id[name].level for name in chosen) for s in spared)
