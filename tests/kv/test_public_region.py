"""What tenants share, and what they never do. Every test of sharing has its twin that must not share."""

import pytest

from penstock.kv.cache.manager import KVManager
from penstock.kv.events import BlockStored, KVEventLog
from penstock.kv.hashing import PUBLIC, BlockHasher, token_array

HASHER = BlockHasher(key=bytes(32), identity="m float32")
TOKENS = token_array(range(81))
"""Five blocks, and a token to compute."""


def manager() -> KVManager:
    return KVManager.with_prefix_cache(32, HASHER)


def compute(kv: KVManager, salt: bytes, public_tokens: int, adapter: str = ""):
    table = kv.open(salt, adapter=adapter, public_tokens=public_tokens)
    kv.adopt(table, kv.match_prefix(table, TOKENS))
    assert kv.extend(table, len(TOKENS)) is not None
    kv.publish_computed(table, TOKENS, len(TOKENS))
    return table


def shared(kv: KVManager, salt: bytes, public_tokens: int, adapter: str = "") -> int:
    """Blocks that such a request would find."""
    return kv.match_prefix(kv.open(salt, adapter=adapter, public_tokens=public_tokens), TOKENS).num_present


@pytest.mark.parametrize(("public_tokens", "blocks"), [(0, 0), (15, 0), (16, 1), (40, 2), (80, 5), (81, 5)])
def test_two_tenants_share_the_whole_public_blocks_and_nothing_after(public_tokens: int, blocks: int) -> None:
    kv = manager()
    table = compute(kv, b"alice", public_tokens)
    assert shared(kv, b"alice", public_tokens) == 5
    assert shared(kv, b"bob", public_tokens) == blocks
    kv.check_invariants([table])
    assert [kv.pool.owner(block) for block in table.blocks] == [PUBLIC] * blocks + [b"alice"] * (6 - blocks)


def test_what_one_calls_public_and_the_other_does_not_is_not_shared() -> None:
    kv = manager()
    compute(kv, b"alice", 48)
    assert shared(kv, b"bob", 48) == 3
    assert shared(kv, b"bob", 32) == 2, "as far as both say so"
    assert shared(kv, b"bob", 80) == 3
    assert shared(kv, b"bob", 0) == 0
    assert shared(kv, b"alice", 0) == 0, "private blocks start from the tenant's own root"
    assert shared(kv, b"", 0) == 0, "no salt is a namespace too, and not the public one"


def test_a_private_block_is_told_apart_by_everything_before_it() -> None:
    hasher = BlockHasher(key=bytes(32), identity="m float32")
    public = hasher.public_root()
    roots = {
        public,
        hasher.public_root(adapter="x"),
        hasher.root(),
        hasher.root(salt=b"alice"),
        hasher.enter(public, salt=b"alice"),
        hasher.enter(public, salt=b"bob"),
        hasher.enter(public, salt=b""),
        BlockHasher(key=bytes(32), identity="m bfloat16").public_root(),
        BlockHasher(key=b"k" * 32, identity="m float32").public_root(),
    }
    assert len(roots) == 9


def test_adapters_have_public_regions_of_their_own() -> None:
    kv = manager()
    compute(kv, b"alice", 48, adapter="x")
    assert shared(kv, b"bob", 48, adapter="x") == 3
    assert shared(kv, b"bob", 48) == 0


def test_public_blocks_are_computed_once_and_outlive_their_first_tenant() -> None:
    kv = manager()
    alice, bob = compute(kv, b"alice", 32), compute(kv, b"bob", 32)
    assert alice.blocks[:2] == bob.blocks[:2]
    assert not {*alice.blocks[2:]} & {*bob.blocks[2:]}
    kv.check_invariants([alice, bob])
    kv.release(alice)
    kv.release(bob)
    kv.check_invariants([])
    assert shared(kv, b"carol", 32) == 2


def test_events_show_what_is_public_and_hide_what_is_not() -> None:
    kv, log = manager(), KVEventLog("public")
    kv.pool.events = log
    compute(kv, b"alice", 40)
    public, alice = log.take()
    compute(kv, b"bob", 40)
    (bob,) = log.take()
    assert isinstance(public, BlockStored)
    assert isinstance(alice, BlockStored)
    assert isinstance(bob, BlockStored)
    assert (public.parent_block_hash, public.token_ids) == (None, tuple(range(32)))
    assert alice.parent_block_hash == bob.parent_block_hash == public.block_hashes[-1]
    assert alice.token_ids == bob.token_ids == ()
    assert len(alice.block_hashes) == len(bob.block_hashes) == 3
    assert not {*alice.block_hashes} & {*bob.block_hashes}


def test_the_public_namespace_is_no_tenants() -> None:
    with pytest.raises(AssertionError, match="no tenant's salt"):
        manager().open(PUBLIC)
