"""The index against a naive one: sets of keys per worker and tier, looked at one by one."""

from collections.abc import Sequence
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.index.prefix_index import NOTHING_HELD, SHARD_ENTRIES, Held, PrefixIndex, Tier

WORKERS = range(5)
NEVER_NS = 1 << 62


def make_index(*, entries_max: int = 100_000, predicted_max: int = 10_000) -> PrefixIndex:
    return PrefixIndex(entries_max=entries_max, predicted_max=predicted_max)


def chain(*tokens: int) -> list[int]:
    """The keys of a prompt: each one depends on all tokens before it."""
    return [hash(tokens[: i + 1]) & (1 << 64) - 1 for i in range(len(tokens))]


def hashed(count: int) -> list[int]:
    """Keys of so many blocks that have nothing to do with one another."""
    return [int.from_bytes(blake2b(i.to_bytes(8), digest_size=8).digest(), "little") for i in range(count)]


class NaiveIndex:
    """The same words, answered by sets."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, Tier], set[int]] = {
            (w, tier): set() for w in WORKERS for tier in Tier
        }
        self._predicted: dict[int, dict[int, int]] = {w: {} for w in WORKERS}
        self._last_ns = dict.fromkeys(WORKERS, 0)

    def stored(self, worker: int, keys: Sequence[int], tier: Tier) -> None:
        self._reported[worker, tier].update(keys)
        if tier is Tier.DEVICE:
            self.retract(worker, keys)

    def removed(self, worker: int, keys: Sequence[int], tier: Tier) -> None:
        self._reported[worker, tier].difference_update(keys)
        if tier is Tier.DEVICE:
            self.retract(worker, keys)

    def retract(self, worker: int, keys: Sequence[int]) -> None:
        for key in keys:
            self._predicted[worker].pop(key, None)

    def cleared(self, worker: int) -> None:
        for tier in Tier:
            self._reported[worker, tier].clear()
        self._predicted[worker].clear()
        self._last_ns[worker] = 0

    def predict(self, worker: int, keys: Sequence[int], until_ns: int) -> None:
        self._last_ns[worker] = max(self._last_ns[worker], until_ns)
        reported = self._reported[worker, Tier.DEVICE]
        self._predicted[worker].update({key: self._last_ns[worker] for key in keys if key not in reported})

    def on_device(self, now_ns: int, worker: int) -> set[int]:
        hoped = {key for key, until_ns in self._predicted[worker].items() if until_ns > now_ns}
        return self._reported[worker, Tier.DEVICE] | hoped

    def on_either(self, now_ns: int, worker: int) -> set[int]:
        return self.on_device(now_ns, worker) | self._reported[worker, Tier.HOST]

    def of(self, now_ns: int, worker: int, keys: Sequence[int]) -> Held:
        device = prefix(self.on_device(now_ns, worker), keys)
        return Held(device, prefix(self.on_either(now_ns, worker), keys) - device)


def prefix(held: set[int], keys: Sequence[int]) -> int:
    """The consecutive prefix, one by one."""
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)
workers, tiers = st.sampled_from(WORKERS), st.sampled_from(Tier)
steps = st.lists(
    st.tuples(st.sampled_from(["stored", "removed", "cleared", "predict", "retract"]), workers, tokens, tiers,
              st.integers(0, 40), st.integers(0, 5)),
    max_size=40,
)  # fmt: skip


def apply(index: PrefixIndex | NaiveIndex, step: tuple, now_ns: int, *, whole_chains: bool) -> None:
    what, worker, prompt, tier, cut, ttl_ns = step
    keys = chain(*prompt)
    if what == "cleared":
        index.cleared(worker)
    elif what == "predict":
        index.predict(worker, keys, now_ns + ttl_ns)
    elif what == "stored":
        index.stored(worker, keys, tier)
    elif what == "removed":
        index.removed(worker, keys[cut:] if not whole_chains else keys, tier)
    else:
        index.retract(worker, keys)


@given(steps, st.lists(tokens, min_size=1, max_size=4))
def test_whatever_is_told_the_same_blocks_are_held_as_in_sets(steps, prompts) -> None:
    """And what a match claims ends at a border, even where chains are broken in the middle."""
    index, naive = make_index(), NaiveIndex()
    for now_ns, step in enumerate(steps):
        apply(index, step, now_ns, whole_chains=False)
        apply(naive, step, now_ns, whole_chains=False)
    now_ns = len(steps)
    for keys in (chain(*prompt) for prompt in prompts):
        match = index.match(now_ns, keys)
        for worker in WORKERS:
            device, either = naive.on_device(now_ns, worker), naive.on_either(now_ns, worker)
            assert {key for key in keys if index.holds(worker, key)} == device & set(keys)
            held = match.of(worker)
            for blocks, there in ((held.device, device), (held.blocks, either)):
                assert blocks == 0 or (keys[0] in there and keys[blocks - 1] in there)
                assert blocks == len(keys) or keys[blocks] not in there


@given(steps, st.lists(tokens, min_size=1, max_size=4))
def test_where_chains_are_whole_the_match_is_the_naive_one(steps, prompts) -> None:
    """Caches that forget the end of a chain first keep chains whole; so does one that forgets everything
    below a block.
    """
    index, naive = make_index(), NaiveIndex()
    for now_ns, step in enumerate(steps):
        if step[0] in ("removed", "retract"):
            step = ("cleared", *step[1:])
        for each in (index, naive):
            apply(each, step, now_ns, whole_chains=True)
    now_ns = len(steps)
    for keys in (chain(*prompt) for prompt in prompts):
        match = index.match(now_ns, keys)
        expected = {worker: naive.of(now_ns, worker, keys) for worker in WORKERS}
        assert {worker: match.of(worker) for worker in WORKERS} == expected
        holders = list(match.holders())
        assert dict(holders) == {w: held for w, held in expected.items() if held.blocks}
        assert [held.blocks for _, held in holders] == sorted((h.blocks for _, h in holders), reverse=True)
        assert {worker: index.prefix_of(now_ns, worker, keys) for worker in WORKERS} == expected
        assert match.longest == max(held.blocks for held in expected.values())


@given(st.lists(st.integers(0, 64), min_size=1, max_size=8), st.lists(st.integers(0, 64), max_size=8))
def test_runs_of_any_lengths_are_found(on_device, on_host) -> None:
    index, keys = make_index(), chain(*range(64))
    for worker, blocks in enumerate(on_device):
        index.stored(worker, keys[:blocks])
    for worker, blocks in enumerate(on_host):
        index.stored(worker, keys[:blocks], Tier.HOST)
    match = index.match(0, keys)
    for worker in range(8):
        device = on_device[worker] if worker < len(on_device) else 0
        host = on_host[worker] if worker < len(on_host) else 0
        assert match.of(worker) == Held(device, max(0, host - device))


def test_nothing_is_held_of_an_unknown_prompt() -> None:
    index = make_index()
    assert index.match(0, chain(1)).of(0) == NOTHING_HELD
    assert index.match(0, []).longest == 0
    assert list(index.match(0, []).holders()) == []


def test_a_prompt_may_go_by_two_lists_of_keys() -> None:
    """Our engine's blocks have one name, everybody else's another."""
    index, own, canonical = make_index(), chain(1, 2, 3), chain(7, 8, 9)
    index.stored(0, own[:2])
    index.stored(1, canonical)
    match = index.match(0, own, canonical)
    assert list(match.holders()) == [(1, Held(3, 0)), (0, Held(2, 0))]


def test_a_match_stays_as_it_was_when_workers_come_and_go() -> None:
    index, keys = make_index(), chain(1, 2)
    index.stored(3, keys)
    match = index.match(0, keys)
    index.cleared(3)
    index.stored(4, keys[:1])
    assert list(match.holders()) == [(3, Held(2, 0))]
    assert list(index.match(0, keys).holders()) == [(4, Held(1, 0))]


def test_the_bit_of_an_old_generation_is_not_given_out_before_it_is_swept() -> None:
    index, keys = make_index(entries_max=4096), chain(*range(100))
    for generation in range(200):
        index.stored(0, keys[:50])
        index.cleared(0)
        assert index.match(0, keys).longest == 0, generation
    for _ in range(64):  # Sweeping goes on with whatever is stored.
        index.stored(1, keys[:1])
    assert index.num_entries == 1, "every shard was swept"
    assert list(index.match(0, keys).holders()) == [(1, Held(1, 0))]


def test_a_prediction_ends_unless_the_worker_confirms_it() -> None:
    index, keys = make_index(), chain(1, 2, 3)
    index.predict(0, keys, until_ns=10)
    assert index.match(9, keys).of(0) == Held(3, 0)
    index.stored(0, keys[:2])
    assert index.match(10, keys).of(0) == Held(2, 0)
    assert (index.num_predicted, index.num_entries) == (0, 2)


def test_what_the_worker_said_outlives_a_prediction_of_it() -> None:
    index, keys = make_index(), chain(1, 2, 3)
    index.stored(0, keys)
    index.predict(0, keys, until_ns=10)
    index.retract(0, keys)
    assert index.match(11, keys).of(0) == Held(3, 0)


def test_the_oldest_predictions_go_first_and_of_a_prompt_its_end() -> None:
    index, old, new = make_index(predicted_max=5), chain(1, 2, 3), chain(4, 5, 6)
    index.predict(0, old, NEVER_NS)
    index.predict(0, new, NEVER_NS)
    assert index.match(0, old).of(0) == Held(2, 0)
    assert index.match(0, new).of(0) == Held(3, 0)
    index.limit_predictions(0, 1)
    assert index.match(0, new).of(0) == Held(1, 0)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(1, 3))
def test_who_knows_what_is_held_predicts_the_same_without_looking(
    reported, hoped, blocks, predicted_max
) -> None:
    """Also which predictions go first, and when they end."""
    keys, spared = chain(*range(8)), make_index(predicted_max=4 * predicted_max)
    plain = make_index(predicted_max=4 * predicted_max)
    for index in (plain, spared):
        index.stored(0, keys[:reported])
        index.predict(0, keys[:hoped], 10)
        index.predict(0, chain(9, 9, 9), 15)
    known = spared.prefix_of(0, 0, keys[:blocks]).device
    assert known == min(blocks, max(reported, hoped)) or spared.num_predicted == 4 * predicted_max
    is_new = plain.predict(0, keys[:blocks], 20)
    assert spared.predict(0, keys[:blocks], 20, known=known) == is_new
    for now_ns in (9, 10, 15, 20):
        assert spared.match(now_ns, keys).of(0) == plain.match(now_ns, keys).of(0), now_ns
        assert spared.num_predicted == plain.num_predicted


def test_where_most_workers_drop_out_is_remembered_and_may_be_wrong_the_next_time() -> None:
    index, system = make_index(), chain(*range(32))
    prompts = [[*system, *chain(i, *range(40))] for i in (100, 200)]
    for worker in range(20):
        index.stored(worker, system)
    for length in (72, 50, 33, 32, 31, 5, 1):
        index.cleared(20)
        index.stored(20, prompts[0][:length])
        assert index.match(0, prompts[0]).of(20) == Held(length, 0)
        assert index.match(0, prompts[0]).of(3) == Held(32, 0)
        assert index.match(0, prompts[1]).of(20) == Held(min(32, length), 0)
        assert index.match(0, system[:10]).longest == 10


def test_many_predictions_that_end_at_once_end_within_a_few_calls() -> None:
    index, keys = make_index(), hashed(5_000)
    index.predict(0, keys, until_ns=1)
    assert (index.num_predicted, index.num_dropped) == (5_000, 0)
    for _ in range(5):
        index.match(2, keys[:1])
    assert index.num_predicted == index.num_entries == 0


@pytest.mark.parametrize("entries_max", [1, 2, 1000, 5000])
def test_a_full_index_forgets_its_oldest_entries(entries_max: int) -> None:
    index = make_index(entries_max=entries_max)
    keys = hashed(20_000)
    for start in range(0, len(keys), 100):
        index.stored(start // 100 % 3, keys[start : start + 100])
        index.predict(4, keys[start : start + 10], NEVER_NS)
    assert index.num_entries <= max(2, entries_max)
    assert index.num_entries + index.num_dropped >= len(keys)
    assert index.holds(4, keys[-100])  # What came last.


def test_shards_fill_evenly_and_their_keys_differ_in_the_bits_at_which_a_dict_begins_to_look() -> None:
    index = make_index(entries_max=16 * SHARD_ENTRIES)
    index.stored(0, hashed(13_000))
    assert (index.num_entries, index.num_dropped) == (13_000, 0)
    shards = index._tiers[Tier.DEVICE]
    assert len(shards) == 16
    for shard in shards:
        assert len({key & 0xFF for key in shard}) > 200, "812 keys of 256 kinds, or nearly"


def test_what_the_last_of_several_workers_loses_takes_no_room() -> None:
    index, keys = make_index(), chain(1, 2, 3)
    for worker in range(20):
        index.stored(worker, keys, Tier.DEVICE)
    assert index.num_entries == 3
    for worker in range(20):
        index.removed(worker, keys, Tier.DEVICE)
    assert index.num_entries == 0
