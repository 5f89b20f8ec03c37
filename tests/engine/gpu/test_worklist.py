"""Work lists: everything is covered exactly once, and a row's cuts are its own."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.gpu.worklist import KV_TILE, SPLITS_MAX, WorkList, WorkListLimits

LIMITS = WorkListLimits.of(max_running=8, step_tokens=600, group_size=4)
Rows = list[tuple[int, int]]
some_rows = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(1, 700), st.integers(1, 130_000)), st.integers(1, 70)),
    min_size=1,
    max_size=8,
)


def work_list(rows: Rows, limits: WorkListLimits = LIMITS) -> WorkList:
    computed, tokens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return WorkList.of(np.arange(len(rows), dtype=np.int32) + 3, computed, tokens, limits)


def cuts(work: WorkList, row: int, start: int, first_place: int) -> set[tuple[int, ...]]:
    """A row's items as seen from the row."""
    return {
        (
            int(token) - start,
            *(int(v) for v in rest),
            -1 if place < 0 else int(place) - first_place,
            int(step),
        )
        for table_row, token, *rest, place, step in work.items
        if table_row == row + 3
    }


@given(some_rows)
def test_every_token_meets_every_position_it_may_see_once(rows: Rows) -> None:
    work = work_list(rows)
    assert len(work.items) <= LIMITS.items_max
    assert len(work.combines) <= LIMITS.combines_max
    places: list[int] = []
    start = 0
    for row, (computed, tokens) in enumerate(rows):
        pieces: dict[int, list[tuple[int, int]]] = {token: [] for token in range(tokens)}
        for table_row, token, position, queries, begin, end, place, step in work.items.tolist():
            if table_row != row + 3:
                continue
            assert queries <= LIMITS.chunk_queries
            assert position - computed == token - start
            assert begin % KV_TILE == 0
            for query in range(queries):
                pieces[token - start + query].append((begin, end))
                if place >= 0:
                    places.append(place + query * step)
        for token, seen in pieces.items():
            seen.sort()
            assert seen[0][0] == 0
            assert all(one[1] == other[0] for one, other in pairwise(seen))
            assert computed + token < seen[-1][1] <= computed + tokens
            assert len(seen) <= SPLITS_MAX
        start += tokens
    merged = [place + i for _, place, count, _ in work.combines.tolist() for i in range(count)]
    assert sorted(places) == sorted(merged) == list(range(len(places)))
    assert len(places) <= LIMITS.partials_max


@given(some_rows, st.tuples(st.integers(0, 130_000), st.integers(1, 12)))
def test_a_row_is_cut_alone_as_in_any_batch(others: Rows, row: tuple[int, int]) -> None:
    rows = [*others[:6], row]
    start = sum(tokens for _, tokens in rows[:-1])
    alone, among = work_list([row]), work_list(rows)
    own = among.combines[among.combines[:, 0] >= start]
    first_place = int(own[0, 1]) if len(own) else 0
    assert cuts(alone, 0, 0, 0) == cuts(among, len(rows) - 1, start, first_place)


def test_single_tokens_find_room_for_their_pieces_before_rows_of_several() -> None:
    tight = replace(LIMITS, partials_max=2 * SPLITS_MAX + 1)
    work = work_list([(8000, 2), (8000, 1), (8000, 1)], tight)
    assert work.combines[:, 0].tolist() == [2, 3]
    assert (work.items[work.items[:, 0] == 3][:, 6] == -1).all()


def test_tiles_of_chunks_come_first_and_the_longest_of_each_kind_before_the_others() -> None:
    work = work_list([(100, 1), (9000, 60), (70, 4), (400, 1)])
    kinds = [bool(item[3] <= LIMITS.single_queries) for item in work.items]
    assert kinds == sorted(kinds)
    assert work.num_chunks == kinds.count(False) == 2
    lengths = [int(item[5] - item[4]) for item in work.items]
    assert lengths[:2] == sorted(lengths[:2], reverse=True)
    assert lengths[2:] == sorted(lengths[2:], reverse=True)
