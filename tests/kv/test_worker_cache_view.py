"""One worker's stream: whatever is lost, sent again or begun anew, what is believed in the end is what the
worker has.
"""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_talker import KVTalker

from penstock.kv.hashing import BlockHasher, PromptKeyMaker, PromptKeys, namespace_of
from penstock.kv.index.block_names import Cleared, EngineBlockNames, ExternalBlockNames, Stored
from penstock.kv.index.prefix_index import Held, PrefixIndex, Tier
from penstock.kv.index.worker_cache_view import (
    TABLE,
    UNREADABLE_MAX,
    UNREPORTED_MAX,
    KVIndexLimits,
    StreamInput,
    StreamState,
    WorkerCacheView,
)

KEY = b"0123456789abcdef"
MAKER = PromptKeyMaker(key=KEY, model="m")
OWN = BlockHasher(key=KEY, identity="m float32")
NS_PER_S = 1_000_000_000


def make(*, own: bool = False, **settings: object) -> WorkerCacheView:
    config = KVIndexLimits(**({"entries_max": 100_000} | settings))  # type: ignore[arg-type]
    index = PrefixIndex(entries_max=config.entries_max, predicted_max=config.predicted_max)
    foreign = ExternalBlockNames(
        MAKER.canonical, blocks_max=config.blocks_per_worker_max, parked_max=config.parked_max
    )
    ours = EngineBlockNames(KEY)
    ours.hasher = OWN
    return WorkerCacheView(index, 3, ours if own else foreign, config)


def prompt(first: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(first, first + 16 * blocks))


def keys_of(tokens: tuple[int, ...], *, salt: bytes = b"", adapter: str = "") -> PromptKeys:
    return MAKER.keys(tokens, salt=salt, adapter=adapter)


def held(cache_view: WorkerCacheView, tokens: tuple[int, ...], **names: object) -> int:
    """Blocks of a prompt that the index believes that the worker has."""
    keys = cache_view.names.keys_of(keys_of(tokens, **names))  # type: ignore[arg-type]
    return cache_view._index.match(0, keys).of(cache_view.worker).blocks


def replay(cache_view: WorkerCacheView, talker: KVTalker, *, kept: int = 10_000) -> None:
    """What the feed does, until nothing is missing any more."""
    for _ in range(4):
        first = cache_view.ask()
        for sequence in range(max(first, len(talker.batches) - kept), len(talker.batches)):
            cache_view.again(sequence, talker.batches[sequence])
        cache_view.end_of_replay()
        if cache_view.wanted is None:
            return
    pytest.fail("something stays missing")


def test_the_table_says_where_every_input_leads_from_every_state() -> None:
    missing = {(s, i) for s in StreamState for i in StreamInput} - set(TABLE)
    only_in_a_gap = {StreamInput.FILLED, StreamInput.LOST}
    assert missing == {(s, i) for s in StreamState if s is not StreamState.GAP for i in only_in_a_gap}


def test_batches_in_order_are_believed_at_once() -> None:
    cache_view, talker = make(), KVTalker()
    assert cache_view.state is StreamState.UNKNOWN
    talker.cache(prompt(0, 4))
    cache_view.live(0, talker.publish())
    assert (cache_view.state, held(cache_view, prompt(0, 4))) == (StreamState.SYNCED, 4)
    talker.forget(prompt(0, 4), keep=1)
    talker.cache(prompt(0, 2) + prompt(900, 1))
    cache_view.live(1, talker.publish())
    assert held(cache_view, prompt(0, 4)) == 2
    talker.clear()
    cache_view.live(2, talker.publish())
    assert (cache_view.state, held(cache_view, prompt(0, 4))) == (StreamState.CLEARED, 0)


def test_a_missed_batch_is_wanted_and_those_after_it_wait() -> None:
    cache_view, talker = make(), KVTalker()
    for i in range(4):
        talker.cache(prompt(0, i + 1))
        talker.publish()
    cache_view.live(0, talker.batches[0])
    cache_view.live(2, talker.batches[2])
    cache_view.live(3, talker.batches[3])
    assert (cache_view.state, cache_view.wanted, cache_view.num_gaps) == (StreamState.GAP, 1, 1)
    assert held(cache_view, prompt(0, 4)) == 1
    replay(cache_view, talker)
    assert (cache_view.state, cache_view.wanted) == (StreamState.SYNCED, None)
    assert held(cache_view, prompt(0, 4)) == 4


def test_batches_that_nobody_keeps_cost_all_that_was_believed() -> None:
    """What they took away is not known."""
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    cache_view.live(0, talker.publish())
    talker.forget(prompt(0, 4), keep=0)
    talker.publish()
    talker.cache(prompt(500, 2))
    cache_view.live(2, talker.publish())
    cache_view.ask()
    cache_view.end_of_replay()
    assert cache_view.state is StreamState.SYNCED
    assert (held(cache_view, prompt(0, 4)), held(cache_view, prompt(500, 2))) == (0, 2)


def test_a_worker_that_counts_from_zero_again_is_another_one() -> None:
    cache_view, old, new = make(), KVTalker(), KVTalker(seed=b"new")
    for i in range(3):
        old.cache(prompt(0, i + 1))
        cache_view.live(i, old.publish())
    new.cache(prompt(700, 2))
    cache_view.live(0, new.publish())
    assert (cache_view.generation, cache_view.state) == (1, StreamState.SYNCED)
    assert (held(cache_view, prompt(0, 3)), held(cache_view, prompt(700, 2))) == (0, 2)


def test_a_new_process_is_noticed_even_if_it_has_counted_further_by_then() -> None:
    """Its batch of the number that was heard last is another one."""
    cache_view, old, new = make(), KVTalker(), KVTalker(seed=b"new")
    old.cache(prompt(0, 3))
    cache_view.live(0, old.publish())
    for i in range(4):
        new.cache(prompt(700, i + 1))
        new.publish()
    cache_view.live(3, new.batches[3])
    replay(cache_view, new)
    assert cache_view.generation == 1
    assert (held(cache_view, prompt(0, 3)), held(cache_view, prompt(700, 4))) == (0, 4)


def test_after_a_lost_connection_nothing_counts_until_the_last_batch_was_sent_again() -> None:
    """The next number may be another process's."""
    cache_view, old, new = make(), KVTalker(), KVTalker(seed=b"new")
    old.cache(prompt(0, 3))
    cache_view.live(0, old.publish())
    cache_view.reconnected()
    for i in range(2):
        new.cache(prompt(700, i + 1))
        new.publish()
    cache_view.live(1, new.batches[1])
    assert held(cache_view, prompt(0, 3)) == 3
    replay(cache_view, new)
    assert (cache_view.generation, held(cache_view, prompt(0, 3)), held(cache_view, prompt(700, 2))) == (
        1,
        0,
        2,
    )


def test_a_lost_connection_that_lost_nothing_costs_nothing() -> None:
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 3))
    cache_view.live(0, talker.publish())
    cache_view.reconnected()
    assert cache_view.state is StreamState.GAP
    replay(cache_view, talker)
    assert (cache_view.state, cache_view.wanted, cache_view.generation) == (StreamState.SYNCED, None, 0)
    assert held(cache_view, prompt(0, 3)) == 3


def test_where_nobody_can_be_asked_a_lost_connection_costs_what_was_believed() -> None:
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 3))
    cache_view.live(0, talker.publish())
    cache_view.reconnected()
    cache_view.ask()
    cache_view.end_of_replay(is_answered=False)
    assert (cache_view.state, held(cache_view, prompt(0, 3))) == (StreamState.CLEARED, 0)
    talker.cache(prompt(700, 2))
    cache_view.live(1, talker.publish())
    assert (cache_view.state, held(cache_view, prompt(700, 2))) == (StreamState.SYNCED, 2)


def test_a_check_finds_batches_lost_at_the_end_and_costs_nothing_else() -> None:
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 1))
    cache_view.live(0, talker.publish())
    talker.cache(prompt(0, 2))
    talker.publish()
    replay(cache_view, talker)
    assert (held(cache_view, prompt(0, 2)), cache_view.generation, cache_view.num_gaps) == (2, 0, 0)
    replay(cache_view, talker)
    assert (held(cache_view, prompt(0, 2)), cache_view.generation, cache_view.num_gaps) == (2, 0, 0)


def test_a_check_that_crosses_a_new_batch_is_no_restart() -> None:
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 1))
    cache_view.live(0, talker.publish())
    first = cache_view.ask()
    cache_view.live(1, talker.publish())
    cache_view.again(first, talker.batches[first])
    cache_view.end_of_replay()
    assert (held(cache_view, prompt(0, 1)), cache_view.generation) == (1, 0)


def test_an_unknown_parent_parks_the_event_and_asks_from_the_start_once() -> None:
    cache_view, talker = make(), KVTalker()
    for i in range(5):
        talker.cache(prompt(0, 1) if i == 1 else prompt(0, i))
        talker.publish()
    cache_view.live(3, talker.batches[3])
    replay(cache_view, talker, kept=2)  # What came before is not kept there.
    assert cache_view.names.num_orphans
    assert held(cache_view, prompt(0, 4)) == 0, "its place is not guessed"
    cache_view.live(5, talker.publish())
    assert cache_view.wanted is None, "it is not asked for again and again"


def test_parked_events_are_placed_when_their_parent_comes() -> None:
    names = ExternalBlockNames(MAKER.canonical, blocks_max=100, parked_max=2)
    keys, tokens = list(keys_of(prompt(0, 3)).canonical), [keys_of(prompt(16 * i, 1)) for i in range(3)]
    first, second, third = (
        Stored([i + 1], i or None, bytes(each._array()), 16, Tier.DEVICE) for i, each in enumerate(tokens)
    )
    assert (names.stored(third), names.stored(second), names.num_parked) == ([], [], 2)
    assert [key for _, found in names.stored(first) for key in found] == keys
    assert names.num_parked == 0
    for orphan in (third._replace(parent=77), third._replace(parent=78), third._replace(parent=79)):
        names.stored(orphan)
    assert names.num_parked == 2, "the oldest are dropped"


@pytest.mark.parametrize("event", [{"type": "BlockMoved"}, {"type": "BlockStored", "block_hashes": "?"}])
def test_what_is_not_understood_may_have_taken_blocks_away(event: object) -> None:
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    cache_view.live(0, talker.publish())
    cache_view.live(1, msgspec.msgpack.encode([0.0, [event]]))
    assert (cache_view.state, held(cache_view, prompt(0, 4))) == (StreamState.CLEARED, 0)
    assert cache_view.num_unknown + cache_view.num_unreadable == 1
    talker.cache(prompt(300, 2))
    talker.batches.append(b"")
    cache_view.live(2, talker.publish())
    assert (cache_view.state, held(cache_view, prompt(300, 2))) == (StreamState.SYNCED, 2)


def test_a_worker_of_nothing_but_nonsense_is_not_listened_to_any_more() -> None:
    cache_view, talker = make(), KVTalker()
    for i in range(UNREADABLE_MAX + 1):
        cache_view.live(i, b"?")
    talker.cache(prompt(0, 1))
    cache_view.live(UNREADABLE_MAX + 1, talker.publish())
    assert (cache_view.state, held(cache_view, prompt(0, 1))) == (StreamState.UNKNOWN, 0)
    assert "could not be read" in cache_view.names.refused


@pytest.mark.parametrize(("block_tokens", "blocks"), [(16, 6), (32, 6), (48, 6), (64, 4)])
def test_larger_blocks_are_cut_into_ours(block_tokens: int, blocks: int) -> None:
    cache_view, talker = make(), KVTalker(block_tokens=block_tokens)
    talker.cache(prompt(0, 6))
    cache_view.live(0, talker.publish())
    assert held(cache_view, prompt(0, 6)) == blocks
    talker.forget(prompt(0, 6), keep=1)
    cache_view.live(1, talker.publish())
    assert held(cache_view, prompt(0, 6)) == block_tokens // 16


def test_blocks_that_are_no_multiple_of_ours_are_refused() -> None:
    cache_view, talker = make(), KVTalker(block_tokens=24)
    talker.cache(prompt(0, 6))
    cache_view.live(0, talker.publish())
    assert cache_view.state is StreamState.UNKNOWN
    assert cache_view.names.refused == "its KV blocks have 24 tokens, which is no multiple of 16"
    cache_view.sent(0, keys_of(prompt(0, 6)))
    assert held(cache_view, prompt(0, 6)) == 6, "predictions count as before"


def test_a_worker_may_tell_of_so_many_blocks() -> None:
    cache_view, talker = make(blocks_per_worker_max=4), KVTalker()
    talker.cache(prompt(0, 5))
    cache_view.live(0, talker.publish())
    assert (held(cache_view, prompt(0, 5)), cache_view.num_unreadable) == (0, 1)


def test_blocks_copied_to_the_host_are_known_by_their_ids() -> None:
    """As vLLM's offloading tells it: no tokens, no parent."""
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    cache_view.live(0, talker.publish())
    ids = talker.hashes(prompt(0, 4))
    copied = {"type": "BlockStored", "block_hashes": ids[2:], "parent_block_hash": None, "token_ids": [],
              "block_size": 0, "medium": "CPU"}  # fmt: skip
    gone = {"type": "BlockRemoved", "block_hashes": ids[2:], "medium": "GPU"}
    cache_view.live(1, msgspec.msgpack.encode([0.0, [copied, gone]]))
    keys = cache_view.names.keys_of(keys_of(prompt(0, 4)))
    assert cache_view._index.match(0, keys).of(3) == Held(2, 2)


def test_blocks_with_images_have_keys_of_their_own() -> None:
    cache_view, tokens = make(), list(prompt(0, 2))
    event = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": tokens, "block_size": 16,
             "extra_keys": [None, [["image-hash", 3]]]}  # fmt: skip
    cache_view.live(0, msgspec.msgpack.encode([0.0, [event]]))
    assert held(cache_view, tuple(tokens)) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["", "x"]), st.integers(0, 2)), min_size=1
    ),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "x"]),
)
def test_blocks_of_other_tenants_and_adapters_are_never_found(reported, salt, adapter) -> None:
    cache_view, talker = make(), KVTalker()
    for each_salt, each_adapter, first in reported:
        talker.cache(prompt(first, 2), namespace_of(each_salt.encode()), each_adapter)
    cache_view.live(0, talker.publish())
    for first in range(3):
        expected = 2 if (salt, adapter, first) in reported else 0
        assert held(cache_view, prompt(first, 2), salt=salt.encode(), adapter=adapter) == expected


words = st.sampled_from(["cache", "cache", "cache", "forget", "clear", "restart"])
steps = st.lists(st.tuples(words, st.integers(0, 1), st.integers(1, 3), st.booleans()), max_size=20)


@settings(max_examples=60)
@given(steps, st.integers(1, 30), st.booleans())
@example(
    [("cache", 0, 1, False), ("cache", 0, 1, True), ("restart", 0, 1, False), ("cache", 0, 1, False)], 3, True
)
def test_with_losses_and_replays_the_index_ends_as_it_would_without(steps, kept, early) -> None:
    """The last batch arrives, and replays are asked for at any time; with a worker its connections end."""
    cache_view, talker, restarts = make(held_batches_max=4), KVTalker(), 0
    for word, family, blocks, arrives in [*steps, ("cache", 0, 1, True)]:
        if word == "cache":
            talker.cache(prompt(1000 * family, blocks))
        elif word == "forget":
            talker.forget(prompt(1000 * family, 3), keep=blocks - 1)
        elif word == "clear":
            talker.clear()
        else:
            restarts += 1
            cache_view.reconnected()
            talker = KVTalker(seed=b"%d" % restarts)
        payload = talker.publish()
        if arrives:
            cache_view.live(len(talker.batches) - 1, payload)
        if early and cache_view.wanted is not None:
            replay(cache_view, talker, kept=kept)
    replay(cache_view, talker, kept=kept)
    for family in range(2):
        tokens = prompt(1000 * family, 3)
        believed, actual = held(cache_view, tokens), talker.blocks_of(tokens)
        if kept >= len(talker.batches):
            assert believed == actual
        assert believed <= actual, "nothing is believed that is not there"


# --- requests ----------------------------------------------------------------------------------------


def answer(cache_view: WorkerCacheView, now_ns: int, tokens: tuple[int, ...], cached_tokens: int) -> None:
    keys = keys_of(tokens)
    cache_view.sent(now_ns, keys)
    cache_view.audit(now_ns, keys, cached_tokens)


def test_a_silent_worker_is_expected_to_have_what_it_was_sent_for_a_while() -> None:
    cache_view = make(predicted_ttl_s=10)
    cache_view.sent(0, keys_of(prompt(0, 4)))
    keys = cache_view.names.keys_of(keys_of(prompt(0, 4)))
    assert cache_view._index.match(10 * NS_PER_S - 1, keys).of(3).blocks == 4
    assert cache_view._index.match(10 * NS_PER_S, keys).of(3).blocks == 0


def test_predictions_of_a_worker_that_tells_end_soon() -> None:
    cache_view, talker = make(announced_ttl_s=1), KVTalker()
    cache_view.live(0, talker.publish())
    cache_view.sent(0, keys_of(prompt(0, 4)))
    keys = cache_view.names.keys_of(keys_of(prompt(0, 4)))
    assert cache_view._index.match(NS_PER_S - 1, keys).of(3).blocks == 4
    assert cache_view._index.match(NS_PER_S, keys).of(3).blocks == 0


def test_answers_are_counted_against_what_was_expected() -> None:
    cache_view = make()
    answer(cache_view, 0, prompt(0, 4), 0)  # Cold, as expected.
    answer(cache_view, 0, prompt(0, 4), 48)  # An engine computes the last block anew.
    answer(cache_view, 0, prompt(0, 4), 16)
    answer(cache_view, 0, prompt(800, 4), 32)
    audited = cache_view.audited
    assert (audited.num_expected, audited.num_hit, audited.num_unexpected) == (6, 4, 2)
    assert cache_view.trust < 1


def test_a_worker_that_caches_nothing_loses_its_credit_and_its_predictions() -> None:
    cache_view = make(predicted_max=1000)
    for i in range(100):
        answer(cache_view, i, prompt(0, 4), 0)
        answer(cache_view, i, prompt(5000 * (i + 1), 50), 0)
    assert cache_view.credit(100) < 0.05
    assert cache_view._index.num_predicted <= 100


def test_a_worker_that_keeps_more_than_was_thought_is_given_more() -> None:
    cache_view = make(predicted_max=100)
    for i in range(20):
        answer(cache_view, i, prompt(5000 * (i + 1), 20), 0)
    for i in range(10):
        answer(cache_view, 100 + i, prompt(5000 * (19 - i), 20), 0)
    smallest = cache_view._predicted_max
    for i in range(40):
        answer(cache_view, 200 + i, prompt(900_000 + 5000 * i, 20), 160)
    assert smallest < cache_view._predicted_max <= 100


def test_what_an_answer_found_is_there_even_if_no_event_told_of_it() -> None:
    cache_view, talker = make(), KVTalker()
    cache_view.live(0, talker.publish())
    answer(cache_view, 0, prompt(0, 4), 32)
    assert held(cache_view, prompt(0, 4)) == 2, "and what it computed it would have told"


def test_events_that_do_not_come_take_credit_away_and_an_idle_worker_loses_none() -> None:
    cache_view, talker = make(stale_s=10), KVTalker()
    cache_view.live(0, talker.publish())
    assert cache_view.credit(1000 * NS_PER_S) == 1.0
    cache_view.sent(1000 * NS_PER_S, keys_of(prompt(0, 4)))
    assert cache_view.credit(1005 * NS_PER_S) == pytest.approx(0.5)
    assert cache_view.credit(1011 * NS_PER_S) == 0.0
    cache_view.live(1, talker.publish())
    assert cache_view.credit(1011 * NS_PER_S) == 1.0
    talker.cache(prompt(0, 4))
    cache_view.live(2, talker.publish())
    cache_view.sent(1012 * NS_PER_S, keys_of(prompt(0, 4)))
    assert cache_view.credit(1090 * NS_PER_S) == 1.0, "nothing new was sent: nothing need be told"


def test_our_engines_events_need_no_tokens() -> None:
    cache_view, keys = make(own=True), keys_of(prompt(0, 4))
    cache_view.hear([Stored(list(keys.own(OWN))[2:], 77, b"", 16, Tier.DEVICE)])
    cache_view.hear([Stored(list(keys.own(OWN))[:2], None, b"", 16, Tier.DEVICE)])
    assert (cache_view.state, held(cache_view, prompt(0, 4))) == (StreamState.SYNCED, 4)
    cache_view.hear([Cleared(), Stored(list(keys.own(OWN))[:1], None, b"", 16, Tier.HOST)])
    assert (cache_view.state, held(cache_view, prompt(0, 4))) == (StreamState.SYNCED, 1)


def test_a_message_that_is_no_batch_costs_what_was_believed_and_too_many_end_the_trust() -> None:
    cache_view, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    cache_view.live(0, talker.publish())
    cache_view.nonsense()
    assert (cache_view.state, held(cache_view, prompt(0, 4))) == (StreamState.SYNCED, 0)
    for _ in range(UNREADABLE_MAX):
        cache_view.nonsense()
    assert cache_view.state is StreamState.UNKNOWN
    assert cache_view.names.refused
    cache_view.nonsense()
    assert cache_view.num_unreadable == UNREADABLE_MAX + 1, "nobody listens any more"


def test_an_orphan_of_a_stream_that_was_heard_late_is_counted_and_not_guessed() -> None:
    cache_view, talker = make(), KVTalker()
    for i in range(3):
        talker.cache(prompt(0, i + 1))
        talker.publish()
    cache_view.live(2, talker.batches[2])
    for sequence in range(cache_view.ask(), 3):
        if sequence == 2:
            cache_view.again(sequence, talker.batches[sequence])
    cache_view.end_of_replay()
    assert cache_view.names.num_orphans > 0
    assert held(cache_view, prompt(0, 3)) == 0, "its place is not guessed"


def test_a_new_process_has_told_of_all_that_its_answers_found() -> None:
    cache_view, talker = make(), KVTalker()
    cache_view.live(0, talker.publish())
    for _ in range(UNREPORTED_MAX):
        cache_view.audit(0, keys_of(prompt(0, 4)), 64)
    assert cache_view.is_unmatched
    cache_view.restarted()
    assert not cache_view.is_unmatched


def test_a_batch_that_waits_from_before_a_gap_makes_room_for_those_after_it() -> None:
    cache_view, talker = make(held_batches_max=1), KVTalker()
    for i in range(9):
        talker.cache(prompt(1000 * i, 1))
        talker.publish()
    cache_view.live(0, talker.batches[0])
    cache_view.live(3, talker.batches[3])
    cache_view.ask()
    cache_view.again(5, talker.batches[5])  # 1 to 4 are not kept there any more: 3 waits for nothing.
    cache_view.end_of_replay()
    assert cache_view.wanted is None
    cache_view.live(8, talker.batches[8])
    cache_view.ask()
    for sequence in (5, 6, 7):
        cache_view.again(sequence, talker.batches[sequence])
    cache_view.end_of_replay()
    assert cache_view.wanted is None
    assert [held(cache_view, prompt(1000 * i, 1)) for i in range(9)] == [0] * 5 + [1] * 4


def test_a_batch_that_is_missing_within_a_check_is_asked_for() -> None:
    cache_view, talker = make(), KVTalker()
    for i in range(4):
        talker.cache(prompt(1000 * i, 1))
        talker.publish()
    cache_view.live(0, talker.batches[0])
    cache_view.ask()  # As a check: nothing is known to be missing.
    for sequence in (0, 1, 3):
        assert cache_view.wanted is None
        cache_view.again(sequence, talker.batches[sequence])
    assert (cache_view.wanted, cache_view.num_gaps, cache_view.state) == (2, 1, StreamState.GAP)
    replay(cache_view, talker)
    assert [held(cache_view, prompt(1000 * i, 1)) for i in range(4)] == [1] * 4


def test_an_orphan_in_the_very_first_batch_has_nothing_before_it_to_ask_for() -> None:
    cache_view = make()
    orphan = {
        "type": "BlockStored", "block_hashes": [2], "parent_block_hash": 1, "token_ids": list(range(16)),
        "block_size": 16,
    }  # fmt: skip
    cache_view.live(0, msgspec.msgpack.encode([0.0, [orphan]]))
    assert cache_view.names.num_orphans == 1
    assert (cache_view.wanted, cache_view.state) == (None, StreamState.SYNCED)
