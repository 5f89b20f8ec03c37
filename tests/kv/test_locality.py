"""Who has how much of a prompt, over workers of both makes and several models."""

from kv_talker import KVTalker

from penstock.kv.hashing import PromptKeys
from penstock.kv.index.block_names import EngineBlockNames, Stored
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.prefix_index import Held, Tier
from penstock.kv.index.worker_cache_view import KVIndexLimits, WorkerCacheView
from penstock.types import WorkerId

A, B, C = (WorkerId(name) for name in "abc")
TOKENS = tuple(range(64))
NS_PER_S = 1_000_000_000


def make(**settings: object) -> KVLocality:
    return KVLocality(KVIndexLimits(**({"entries_max": 10_000} | settings)), b"0123456789abcdef")  # type: ignore[arg-type]


def add_own(
    locality: KVLocality, worker: WorkerId, *, model: str = "m", key: bytes = b"", identity: str = "one"
) -> WorkerCacheView:
    """A worker of ours that has announced what it computes."""
    cache_view = locality.add(worker, model=model, is_own=True, key=key)
    locality.identify(worker, identity)
    return cache_view


def keys_in(locality: KVLocality, model: str = "m") -> PromptKeys:
    return locality.maker(model).keys(TOKENS, salt=b"s")


def tell(cache_view: WorkerCacheView, keys: PromptKeys, blocks: int, tier: Tier = Tier.DEVICE) -> None:
    assert isinstance(cache_view.names, EngineBlockNames)
    assert cache_view.names.hasher is not None
    cache_view.hear([Stored(list(keys.own(cache_view.names.hasher))[:blocks], None, b"", 16, tier)])


def test_workers_of_both_makes_are_found_by_one_look() -> None:
    locality, talker = make(), KVTalker()
    keys = keys_in(locality)
    tell(add_own(locality, A), keys, 3)
    foreign = locality.add(B, model="m", is_own=False)
    locality.add(C, model="m", is_own=False)
    talker.cache(TOKENS, "cw==")  # "s", as the backend sends it.
    foreign.live(0, talker.publish())
    located = locality.match(0, keys)
    assert located.holders(9) == [(B, Held(4, 0)), (A, Held(3, 0))]
    assert [located.of(worker) for worker in (A, B, C)] == [Held(3, 0), Held(4, 0), Held(0, 0)]


def test_workers_of_ours_with_keys_of_their_own_are_found_by_the_same_look() -> None:
    """Launched here, started elsewhere with a key, and with another one: nobody's blocks pass for
    another's.
    """
    locality = make()
    keys = keys_in(locality)
    tell(add_own(locality, A), keys, 3)
    tell(add_own(locality, B, key=b"one key, 16 bytes"), keys, 2)
    add_own(locality, C, key=b"another, 16 bytes")
    assert locality.match(0, keys).holders(9) == [(A, Held(3, 0)), (B, Held(2, 0))]
    locality.remove(B)
    assert locality.match(0, keys).holders(9) == [(A, Held(3, 0))]


def test_of_a_worker_with_larger_blocks_only_whole_ones_are_counted_on() -> None:
    """A vLLM on a CPU has blocks of 128 tokens: of two prompts that are alike for 400 it reuses 384."""
    locality, talker = make(), KVTalker(block_tokens=128)
    cache_view = locality.add(A, model="m", is_own=False)
    talker.cache(tuple(range(600)))
    cache_view.live(0, talker.publish())
    other = (*range(400), *range(1000, 1200))
    keys = locality.maker("m").keys(other)
    assert locality.match(0, keys).of(A) == Held(24, 0)
    locality.sent(0, A, keys)
    locality.answered(0, A, keys, talker.cache(other))
    assert (cache_view.audited.num_expected, cache_view.audited.num_hit, cache_view.trust) == (24, 24, 1.0)
    cache_view.live(1, talker.publish())
    again = locality.maker("m").keys(other)
    locality.sent(0, A, again)
    locality.answered(0, A, again, talker.cache(other))
    assert cache_view.credit(1000 * NS_PER_S) == 1.0, (
        "nothing new is awaited: the rest of the prompt fills no block"
    )


def test_prompts_of_other_models_and_requests_without_keys_find_nothing() -> None:
    locality = make()
    cache_view = add_own(locality, A)
    tell(cache_view, keys_in(locality), 3)
    add_own(locality, B, model="n")
    assert locality.match(0, keys_in(locality, "n")).holders(9) == []
    assert locality.match(0, None).holders(9) == []


def test_a_workers_number_is_given_to_the_next_one_without_its_blocks() -> None:
    locality = make()
    keys = keys_in(locality)
    tell(add_own(locality, A), keys, 3)
    located = locality.match(0, keys)
    locality.remove(A)
    locality.remove(A)
    assert add_own(locality, B).worker == 0
    assert locality.match(0, keys).holders(9) == []
    assert located.holders(9) == [(A, Held(3, 0))], "as it was when it was asked"
    assert locality.get(A) is None


def test_requests_are_expected_where_they_were_sent_and_checked_when_answered() -> None:
    locality = make()
    keys = keys_in(locality)
    cache_view = locality.add(A, model="m", is_own=False)
    locality.sent(0, A, keys)
    assert locality.match(0, keys).holders(9) == [(A, Held(4, 0))]
    locality.answered(0, A, keys, 0)
    again = keys_in(locality)
    locality.sent(1, A, again)
    locality.answered(1, A, again, 48)
    assert (cache_view.audited.num_expected, cache_view.audited.num_hit) == (3, 3)
    locality.sent(0, WorkerId("unknown"), keys)
    locality.answered(0, WorkerId("unknown"), keys, 48)


def test_doubts_take_blocks_off_the_end_the_host_first() -> None:
    locality = make(stale_s=10)
    keys = keys_in(locality)
    cache_view = add_own(locality, A)
    tell(cache_view, keys, 2)
    tell(cache_view, keys, 4, Tier.HOST)
    assert locality.match(0, keys).of(A) == Held(2, 2)
    other = locality.maker("m").keys(tuple(range(900, 932)))
    locality.sent(0, A, other)
    assert locality.match(3 * NS_PER_S, keys).of(A) == Held(2, 0)
    assert locality.match(6 * NS_PER_S, keys).of(A) == Held(1, 0)
    assert locality.match(10 * NS_PER_S, keys).holders(9) == []


def test_each_worker_is_looked_up_by_what_it_computes_whatever_its_model_is_called() -> None:
    """One name, two checkpoints or types of KV: blocks of one are none of the other's, and one look finds
    both.
    """
    locality = make()
    keys = keys_in(locality)
    tell(add_own(locality, A, identity="one"), keys, 3)
    tell(add_own(locality, B, identity="two"), keys, 2)
    assert locality.match(0, keys).holders(9) == [(A, Held(3, 0)), (B, Held(2, 0))]
    one, two = (locality.get(worker) for worker in (A, B))
    assert one is not None
    assert two is not None
    assert not {*one.names.keys_of(keys)} & {*two.names.keys_of(keys)}


def test_nothing_of_ours_is_found_before_it_says_what_it_computes() -> None:
    locality = make()
    keys = keys_in(locality)
    cache_view = locality.add(A, model="m", is_own=True)
    locality.sent(0, A, keys)
    assert locality.match(0, keys).holders(9) == []
    locality.identify(A, "one")
    tell(cache_view, keys, 3)
    assert locality.match(0, keys).holders(9) == [(A, Held(3, 0))]


def test_a_worker_that_computes_something_else_from_now_on_has_nothing() -> None:
    locality = make()
    keys = keys_in(locality)
    cache_view = add_own(locality, A)
    tell(cache_view, keys, 3)
    locality.identify(A, "one")
    assert locality.match(0, keys).of(A) == Held(3, 0), "as it was"
    locality.identify(A, "two")
    assert locality.match(0, keys).of(A) == Held(0, 0)
    locality.identify(A, "one")
    assert locality.match(0, keys).of(A) == Held(0, 0), "and it does not come back by itself"
    tell(cache_view, keys, 2)
    assert locality.match(0, keys).of(A) == Held(2, 0)


def test_workers_of_another_model_that_computes_the_same_are_no_candidates() -> None:
    """One checkpoint under two names: its prompts have the same names of blocks, and each model has its own
    workers.
    """
    locality = make()
    keys = keys_in(locality)
    tell(add_own(locality, A), keys, 4)
    tell(add_own(locality, B, model="n"), keys, 3)
    assert locality.match(0, keys).holders(1) == [(A, Held(4, 0))]
    assert locality.match(0, keys_in(locality, "n")).holders(1) == [(B, Held(3, 0))]


def test_without_external_workers_no_prompt_is_hashed_for_them() -> None:
    locality = make()
    locality.add(A, model="m", is_own=False)
    locality.remove(A)
    keys = keys_in(locality)
    assert locality.match(0, keys).holders(9) == []
    assert keys._canonical is None


def test_what_was_seen_of_a_worker_counts_after_it_has_gone() -> None:
    locality = make()
    keys = keys_in(locality)
    cache_view = add_own(locality, A)
    locality.sent(0, A, keys)
    locality.answered(0, A, keys, cached_tokens=48)
    foreign = locality.add(B, model="m", is_own=False)
    foreign.live(0, b"no batch of events")
    foreign.num_unknown += 2
    cache_view.num_gaps += 1
    for _ in range(2):
        seen = locality.statistics(0)
        assert (seen.gaps, seen.unreadable) == (1, 3)
        assert (seen.blocks_hit, seen.blocks_missed, seen.blocks_unexpected) == (0, 0, 3)
        locality.remove(A)
        locality.remove(B)
