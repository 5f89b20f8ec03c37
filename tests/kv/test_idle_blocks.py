"""The list of idle blocks against the obvious one, an `OrderedDict`."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.cache.idle_blocks import IdleBlocks

NUM_BLOCKS = 8
STEPS = st.tuples(st.sampled_from(("append", "remove", "take", "put_first")), st.integers(0, NUM_BLOCKS - 1))


@given(st.lists(STEPS, max_size=40))
def test_it_keeps_the_order_of_an_ordered_dict(steps: list[tuple[str, int]]) -> None:
    idle, plain = IdleBlocks(NUM_BLOCKS), OrderedDict[int, None]()
    for what, block in steps:
        if what == "take":
            count = min(block, len(plain))
            assert idle.take(count) == [plain.popitem(last=False)[0] for _ in range(count)]
        elif what == "append":
            added = [each for each in (block, (block + 3) % NUM_BLOCKS) if each not in plain]
            idle.append(added)
            plain.update(dict.fromkeys(added))
        elif block in plain and what == "remove":
            idle.remove(block)
            del plain[block]
        elif block in plain:
            idle.put_first(block)
            plain.move_to_end(block, last=False)
        assert list(idle) == list(plain)
        assert len(idle) == len(plain)
        assert [each in idle for each in range(NUM_BLOCKS)] == [each in plain for each in range(NUM_BLOCKS)]


def test_what_is_idle_is_not_put_there_again_and_what_is_not_is_not_taken_out() -> None:
    idle = IdleBlocks(4)
    idle.append((2, 1))
    for wrong in (lambda: idle.append((1,)), lambda: idle.remove(3), lambda: idle.take(3)):
        with pytest.raises(AssertionError):
            wrong()
    assert list(idle) == [2, 1]
