"""One worker's stream: whatever is lost, sent again or begun anew, what is believed in the end is what the worker has."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_talker import KVTalker

from penstock.kv.hashing import BlockHasher
from penstock.kv.index.block_names import ForeignNames, OwnNames
from penstock.kv.index.limits import KVIndexLimits
from penstock.kv.index.prefix_index import Held, PrefixIndex, Tier
from penstock.kv.index.prompt_keys import PromptKeyMaker, PromptKeys, namespace_of
from penstock.kv.index.residency import TABLE, UNREADABLE_MAX, UNTOLD_MAX, Residency, StreamInput, StreamState
from penstock.kv.index.vllm_events import Cleared, Stored

KEY = b"0123456789abcdef"
MAKER = PromptKeyMaker(key=KEY, model="m")
OWN = BlockHasher(key=KEY, identity="m float32")
NS_PER_S = 1_000_000_000


def make(*, own: bool = False, **settings: object) -> Residency:
    config = KVIndexLimits(**({"entries_max": 100_000} | settings))  # type: ignore[arg-type]
    index = PrefixIndex(entries_max=config.entries_max, predicted_max=config.predicted_max)
    foreign = ForeignNames(
        MAKER.canonical, blocks_max=config.blocks_per_worker_max, parked_max=config.parked_max
    )
    ours = OwnNames(KEY)
    ours.hasher = OWN
    return Residency(index, 3, ours if own else foreign, config)


def prompt(first: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(first, first + 16 * blocks))


def keys_of(tokens: tuple[int, ...], *, salt: bytes = b"", adapter: str = "") -> PromptKeys:
    return MAKER.keys(tokens, salt=salt, adapter=adapter)


def held(residency: Residency, tokens: tuple[int, ...], **names: object) -> int:
    """Blocks of a prompt that the index believes that the worker has."""
    keys = residency.names.keys_of(keys_of(tokens, **names))  # type: ignore[arg-type]
    return residency._index.match(0, keys).of(residency.worker).blocks


def replay(residency: Residency, talker: KVTalker, *, kept: int = 10_000) -> None:
    """What the feed does, until nothing is missing any more."""
    for _ in range(4):
        first = residency.ask()
        for sequence in range(max(first, len(talker.batches) - kept), len(talker.batches)):
            residency.again(sequence, talker.batches[sequence])
        residency.end_of_replay()
        if residency.wanted is None:
            return
    pytest.fail("something stays missing")


def test_the_table_says_where_every_input_leads_from_every_state() -> None:
    missing = {(s, i) for s in StreamState for i in StreamInput} - set(TABLE)
    only_in_a_gap = {StreamInput.FILLED, StreamInput.LOST}
    assert missing == {(s, i) for s in StreamState if s is not StreamState.GAP for i in only_in_a_gap}


def test_batches_in_order_are_believed_at_once() -> None:
    residency, talker = make(), KVTalker()
    assert residency.state is StreamState.UNKNOWN
    talker.cache(prompt(0, 4))
    residency.live(0, talker.publish())
    assert (residency.state, held(residency, prompt(0, 4))) == (StreamState.SYNCED, 4)
    talker.forget(prompt(0, 4), keep=1)
    talker.cache(prompt(0, 2) + prompt(900, 1))
    residency.live(1, talker.publish())
    assert held(residency, prompt(0, 4)) == 2
    talker.clear()
    residency.live(2, talker.publish())
    assert (residency.state, held(residency, prompt(0, 4))) == (StreamState.CLEARED, 0)


def test_a_missed_batch_is_wanted_and_those_after_it_wait() -> None:
    residency, talker = make(), KVTalker()
    for i in range(4):
        talker.cache(prompt(0, i + 1))
        talker.publish()
    residency.live(0, talker.batches[0])
    residency.live(2, talker.batches[2])
    residency.live(3, talker.batches[3])
    assert (residency.state, residency.wanted, residency.num_gaps) == (StreamState.GAP, 1, 1)
    assert held(residency, prompt(0, 4)) == 1
    replay(residency, talker)
    assert (residency.state, residency.wanted) == (StreamState.SYNCED, None)
    assert held(residency, prompt(0, 4)) == 4


def test_batches_that_nobody_keeps_cost_all_that_was_believed() -> None:
    """What they took away is not known."""
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    residency.live(0, talker.publish())
    talker.forget(prompt(0, 4), keep=0)
    talker.publish()
    talker.cache(prompt(500, 2))
    residency.live(2, talker.publish())
    residency.ask()
    residency.end_of_replay()
    assert residency.state is StreamState.SYNCED
    assert (held(residency, prompt(0, 4)), held(residency, prompt(500, 2))) == (0, 2)


def test_a_worker_that_counts_from_zero_again_is_another_one() -> None:
    residency, old, new = make(), KVTalker(), KVTalker(seed=b"new")
    for i in range(3):
        old.cache(prompt(0, i + 1))
        residency.live(i, old.publish())
    new.cache(prompt(700, 2))
    residency.live(0, new.publish())
    assert (residency.generation, residency.state) == (1, StreamState.SYNCED)
    assert (held(residency, prompt(0, 3)), held(residency, prompt(700, 2))) == (0, 2)


def test_a_new_process_is_noticed_even_if_it_has_counted_further_by_then() -> None:
    """Its batch of the number that was heard last is another one."""
    residency, old, new = make(), KVTalker(), KVTalker(seed=b"new")
    old.cache(prompt(0, 3))
    residency.live(0, old.publish())
    for i in range(4):
        new.cache(prompt(700, i + 1))
        new.publish()
    residency.live(3, new.batches[3])
    replay(residency, new)
    assert residency.generation == 1
    assert (held(residency, prompt(0, 3)), held(residency, prompt(700, 4))) == (0, 4)


def test_after_a_lost_connection_nothing_counts_until_the_last_batch_was_sent_again() -> None:
    """The next number may be another process's."""
    residency, old, new = make(), KVTalker(), KVTalker(seed=b"new")
    old.cache(prompt(0, 3))
    residency.live(0, old.publish())
    residency.reconnected()
    for i in range(2):
        new.cache(prompt(700, i + 1))
        new.publish()
    residency.live(1, new.batches[1])
    assert held(residency, prompt(0, 3)) == 3
    replay(residency, new)
    assert (residency.generation, held(residency, prompt(0, 3)), held(residency, prompt(700, 2))) == (1, 0, 2)


def test_where_nobody_can_be_asked_a_lost_connection_costs_what_was_believed() -> None:
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 3))
    residency.live(0, talker.publish())
    residency.reconnected()
    residency.ask()
    residency.end_of_replay(is_answered=False)
    assert (residency.state, held(residency, prompt(0, 3))) == (StreamState.CLEARED, 0)
    talker.cache(prompt(700, 2))
    residency.live(1, talker.publish())
    assert (residency.state, held(residency, prompt(700, 2))) == (StreamState.SYNCED, 2)


def test_a_check_finds_batches_lost_at_the_end_and_costs_nothing_else() -> None:
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 1))
    residency.live(0, talker.publish())
    talker.cache(prompt(0, 2))
    talker.publish()
    replay(residency, talker)
    assert (held(residency, prompt(0, 2)), residency.generation, residency.num_gaps) == (2, 0, 0)
    replay(residency, talker)
    assert (held(residency, prompt(0, 2)), residency.generation, residency.num_gaps) == (2, 0, 0)


def test_a_check_that_crosses_a_new_batch_is_no_restart() -> None:
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 1))
    residency.live(0, talker.publish())
    first = residency.ask()
    residency.live(1, talker.publish())
    residency.again(first, talker.batches[first])
    residency.end_of_replay()
    assert (held(residency, prompt(0, 1)), residency.generation) == (1, 0)


def test_an_unknown_parent_parks_the_event_and_asks_from_the_start_once() -> None:
    residency, talker = make(), KVTalker()
    for i in range(5):
        talker.cache(prompt(0, 1) if i == 1 else prompt(0, i))
        talker.publish()
    residency.live(3, talker.batches[3])
    replay(residency, talker, kept=2)  # What came before is not kept there.
    assert residency.names.num_orphans
    assert held(residency, prompt(0, 4)) == 0, "its place is not guessed"
    residency.live(5, talker.publish())
    assert residency.wanted is None, "it is not asked for again and again"


def test_parked_events_are_placed_when_their_parent_comes() -> None:
    names = ForeignNames(MAKER.canonical, blocks_max=100, parked_max=2)
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
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    residency.live(0, talker.publish())
    residency.live(1, msgspec.msgpack.encode([0.0, [event]]))
    assert (residency.state, held(residency, prompt(0, 4))) == (StreamState.CLEARED, 0)
    assert residency.num_unknown + residency.num_unreadable == 1
    talker.cache(prompt(300, 2))
    talker.batches.append(b"")
    residency.live(2, talker.publish())
    assert (residency.state, held(residency, prompt(300, 2))) == (StreamState.SYNCED, 2)


def test_a_worker_of_nothing_but_nonsense_is_not_listened_to_any_more() -> None:
    residency, talker = make(), KVTalker()
    for i in range(UNREADABLE_MAX + 1):
        residency.live(i, b"?")
    talker.cache(prompt(0, 1))
    residency.live(UNREADABLE_MAX + 1, talker.publish())
    assert (residency.state, held(residency, prompt(0, 1))) == (StreamState.UNKNOWN, 0)
    assert "could not be read" in residency.names.refused


@pytest.mark.parametrize(("block_tokens", "blocks"), [(16, 6), (32, 6), (48, 6), (64, 4)])
def test_larger_blocks_are_cut_into_ours(block_tokens: int, blocks: int) -> None:
    residency, talker = make(), KVTalker(block_tokens=block_tokens)
    talker.cache(prompt(0, 6))
    residency.live(0, talker.publish())
    assert held(residency, prompt(0, 6)) == blocks
    talker.forget(prompt(0, 6), keep=1)
    residency.live(1, talker.publish())
    assert held(residency, prompt(0, 6)) == block_tokens // 16


def test_blocks_that_are_no_multiple_of_ours_are_refused() -> None:
    residency, talker = make(), KVTalker(block_tokens=24)
    talker.cache(prompt(0, 6))
    residency.live(0, talker.publish())
    assert residency.state is StreamState.UNKNOWN
    assert residency.names.refused == "its KV blocks have 24 tokens, which is no multiple of 16"
    residency.sent(0, keys_of(prompt(0, 6)))
    assert held(residency, prompt(0, 6)) == 6, "predictions count as before"


def test_a_worker_may_tell_of_so_many_blocks() -> None:
    residency, talker = make(blocks_per_worker_max=4), KVTalker()
    talker.cache(prompt(0, 5))
    residency.live(0, talker.publish())
    assert (held(residency, prompt(0, 5)), residency.num_unreadable) == (0, 1)


def test_blocks_copied_to_the_host_are_known_by_their_ids() -> None:
    """As vLLM's offloading tells it: no tokens, no parent."""
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    residency.live(0, talker.publish())
    ids = talker.hashes(prompt(0, 4))
    copied = {"type": "BlockStored", "block_hashes": ids[2:], "parent_block_hash": None, "token_ids": [],
              "block_size": 0, "medium": "CPU"}  # fmt: skip
    gone = {"type": "BlockRemoved", "block_hashes": ids[2:], "medium": "GPU"}
    residency.live(1, msgspec.msgpack.encode([0.0, [copied, gone]]))
    keys = residency.names.keys_of(keys_of(prompt(0, 4)))
    assert residency._index.match(0, keys).of(3) == Held(2, 2)


def test_blocks_with_images_have_keys_of_their_own() -> None:
    residency, tokens = make(), list(prompt(0, 2))
    event = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": tokens, "block_size": 16,
             "extra_keys": [None, [["image-hash", 3]]]}  # fmt: skip
    residency.live(0, msgspec.msgpack.encode([0.0, [event]]))
    assert held(residency, tuple(tokens)) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["", "x"]), st.integers(0, 2)), min_size=1
    ),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "x"]),
)
def test_blocks_of_other_tenants_and_adapters_are_never_found(told, salt, adapter) -> None:
    residency, talker = make(), KVTalker()
    for each_salt, each_adapter, first in told:
        talker.cache(prompt(first, 2), namespace_of(each_salt.encode()), each_adapter)
    residency.live(0, talker.publish())
    for first in range(3):
        expected = 2 if (salt, adapter, first) in told else 0
        assert held(residency, prompt(first, 2), salt=salt.encode(), adapter=adapter) == expected


words = st.sampled_from(["cache", "cache", "cache", "forget", "clear", "restart"])
steps = st.lists(st.tuples(words, st.integers(0, 1), st.integers(1, 3), st.booleans()), max_size=20)


@settings(max_examples=60)
@given(steps, st.integers(1, 30), st.booleans())
@example(
    [("cache", 0, 1, False), ("cache", 0, 1, True), ("restart", 0, 1, False), ("cache", 0, 1, False)], 3, True
)
def test_with_losses_and_replays_the_index_ends_as_it_would_without(steps, kept, early) -> None:
    """The last batch arrives, and replays are asked for at any time; with a worker its connections end."""
    residency, talker, restarts = make(held_batches_max=4), KVTalker(), 0
    for word, family, blocks, arrives in [*steps, ("cache", 0, 1, True)]:
        if word == "cache":
            talker.cache(prompt(1000 * family, blocks))
        elif word == "forget":
            talker.forget(prompt(1000 * family, 3), keep=blocks - 1)
        elif word == "clear":
            talker.clear()
        else:
            restarts += 1
            residency.reconnected()
            talker = KVTalker(seed=b"%d" % restarts)
        payload = talker.publish()
        if arrives:
            residency.live(len(talker.batches) - 1, payload)
        if early and residency.wanted is not None:
            replay(residency, talker, kept=kept)
    replay(residency, talker, kept=kept)
    for family in range(2):
        tokens = prompt(1000 * family, 3)
        believed, actual = held(residency, tokens), talker.blocks_of(tokens)
        if kept >= len(talker.batches):
            assert believed == actual
        assert believed <= actual, "nothing is believed that is not there"


# --- requests ----------------------------------------------------------------------------------------


def answer(residency: Residency, now_ns: int, tokens: tuple[int, ...], cached_tokens: int) -> None:
    keys = keys_of(tokens)
    residency.sent(now_ns, keys)
    residency.audit(now_ns, keys, cached_tokens)


def test_a_silent_worker_is_expected_to_have_what_it_was_sent_for_a_while() -> None:
    residency = make(predicted_ttl_s=10)
    residency.sent(0, keys_of(prompt(0, 4)))
    keys = residency.names.keys_of(keys_of(prompt(0, 4)))
    assert residency._index.match(10 * NS_PER_S - 1, keys).of(3).blocks == 4
    assert residency._index.match(10 * NS_PER_S, keys).of(3).blocks == 0


def test_predictions_of_a_worker_that_tells_end_soon() -> None:
    residency, talker = make(announced_ttl_s=1), KVTalker()
    residency.live(0, talker.publish())
    residency.sent(0, keys_of(prompt(0, 4)))
    keys = residency.names.keys_of(keys_of(prompt(0, 4)))
    assert residency._index.match(NS_PER_S - 1, keys).of(3).blocks == 4
    assert residency._index.match(NS_PER_S, keys).of(3).blocks == 0


def test_answers_are_counted_against_what_was_expected() -> None:
    residency = make()
    answer(residency, 0, prompt(0, 4), 0)  # Cold, as expected.
    answer(residency, 0, prompt(0, 4), 48)  # An engine computes the last block anew.
    answer(residency, 0, prompt(0, 4), 16)
    answer(residency, 0, prompt(800, 4), 32)
    audited = residency.audited
    assert (audited.num_answers, audited.num_expected, audited.num_hit, audited.num_unexpected) == (
        4,
        6,
        4,
        2,
    )
    assert residency.trust < 1


def test_a_worker_that_caches_nothing_loses_its_credit_and_its_predictions() -> None:
    residency = make(predicted_max=1000)
    for i in range(100):
        answer(residency, i, prompt(0, 4), 0)
        answer(residency, i, prompt(5000 * (i + 1), 50), 0)
    assert residency.credit(100) < 0.05
    assert residency._index.num_predicted <= 100


def test_a_worker_that_keeps_more_than_was_thought_is_given_more() -> None:
    residency = make(predicted_max=100)
    for i in range(20):
        answer(residency, i, prompt(5000 * (i + 1), 20), 0)
    for i in range(10):
        answer(residency, 100 + i, prompt(5000 * (19 - i), 20), 0)
    smallest = residency._predicted_max
    for i in range(40):
        answer(residency, 200 + i, prompt(900_000 + 5000 * i, 20), 160)
    assert smallest < residency._predicted_max <= 100


def test_what_an_answer_found_is_there_even_if_no_event_told_of_it() -> None:
    residency, talker = make(), KVTalker()
    residency.live(0, talker.publish())
    answer(residency, 0, prompt(0, 4), 32)
    assert held(residency, prompt(0, 4)) == 2, "and what it computed it would have told"


def test_events_that_do_not_come_take_credit_away_and_an_idle_worker_loses_none() -> None:
    residency, talker = make(stale_s=10), KVTalker()
    residency.live(0, talker.publish())
    assert residency.credit(1000 * NS_PER_S) == 1.0
    residency.sent(1000 * NS_PER_S, keys_of(prompt(0, 4)))
    assert residency.credit(1005 * NS_PER_S) == pytest.approx(0.5)
    assert residency.credit(1011 * NS_PER_S) == 0.0
    residency.live(1, talker.publish())
    assert residency.credit(1011 * NS_PER_S) == 1.0
    talker.cache(prompt(0, 4))
    residency.live(2, talker.publish())
    residency.sent(1012 * NS_PER_S, keys_of(prompt(0, 4)))
    assert residency.credit(1090 * NS_PER_S) == 1.0, "nothing new was sent: nothing need be told"


def test_our_engines_events_need_no_tokens() -> None:
    residency, keys = make(own=True), keys_of(prompt(0, 4))
    residency.hear([Stored(list(keys.own(OWN))[2:], 77, b"", 16, Tier.DEVICE)])
    residency.hear([Stored(list(keys.own(OWN))[:2], None, b"", 16, Tier.DEVICE)])
    assert (residency.state, held(residency, prompt(0, 4))) == (StreamState.SYNCED, 4)
    residency.hear([Cleared(), Stored(list(keys.own(OWN))[:1], None, b"", 16, Tier.HOST)])
    assert (residency.state, held(residency, prompt(0, 4))) == (StreamState.SYNCED, 1)


def test_a_message_that_is_no_batch_costs_what_was_believed_and_too_many_end_the_trust() -> None:
    residency, talker = make(), KVTalker()
    talker.cache(prompt(0, 4))
    residency.live(0, talker.publish())
    residency.nonsense()
    assert (residency.state, held(residency, prompt(0, 4))) == (StreamState.SYNCED, 0)
    for _ in range(UNREADABLE_MAX):
        residency.nonsense()
    assert residency.state is StreamState.UNKNOWN
    assert residency.names.refused
    residency.nonsense()
    assert residency.num_unreadable == UNREADABLE_MAX + 1, "nobody listens any more"


def test_an_orphan_of_a_stream_that_was_heard_late_is_asked_for_from_the_start() -> None:
    """Its parent was told before: one orphan is enough to ask, and it is counted."""
    residency, talker = make(), KVTalker()
    for i in range(3):
        talker.cache(prompt(0, i + 1))
        talker.publish()
    residency.live(2, talker.batches[2])
    for sequence in range(residency.ask(), 3):
        if sequence == 2:
            residency.again(sequence, talker.batches[sequence])
    residency.end_of_replay()
    assert residency.names.num_orphans > 0
    assert residency.wanted == 0, "what was told before may still be kept there"


def test_a_new_process_has_told_of_all_that_its_answers_found() -> None:
    residency, talker = make(), KVTalker()
    residency.live(0, talker.publish())
    for _ in range(UNTOLD_MAX):
        residency.audit(0, keys_of(prompt(0, 4)), 64)
    assert residency.is_unmatched
    residency.restarted()
    assert not residency.is_unmatched
