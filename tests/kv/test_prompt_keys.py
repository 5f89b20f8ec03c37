"""A prompt's keys: the engine's own names cut short, and canonical ones that depend on everything that
matters.
"""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.cache.host_tier import HostLimits
from penstock.kv.cache.manager import KVManager
from penstock.kv.hashing import (
    BlockHasher,
    CanonicalHasher,
    PromptKeyMaker,
    namespace_of,
    own_keys,
    token_bytes,
)

KEY = b"0123456789abcdef"
OWN = BlockHasher(key=KEY, identity="m float32")


def make_maker(*, model: str = "m") -> PromptKeyMaker:
    return PromptKeyMaker(key=KEY, model=model)


token_ids = st.lists(st.integers(0, 3), max_size=100).map(tuple)
salts = st.sampled_from([b"", b"a", b"b"])
adapters = st.sampled_from(["", "x", "y"])


@given(token_ids, salts, adapters, st.integers(0, 100))
def test_own_keys_are_the_names_that_our_engine_gives_the_same_prompt(tokens, salt, adapter, public) -> None:
    public_tokens = min(public, len(tokens))
    manager = KVManager.with_prefix_cache(16, OWN, HostLimits())
    table = manager.open(salt, adapter=adapter, public_tokens=public_tokens)
    # One token more: the engine always computes the last one, so it does not look its block up.
    manager.match_prefix(table, array("i", (*tokens, 0)), len(tokens) + 1)
    keys = make_maker().keys(tokens, salt=salt, public_tokens=public_tokens, adapter=adapter)
    assert keys.num_blocks == len(tokens) // 16
    assert list(keys.own(OWN)) == own_keys(table.hashes[: keys.num_blocks])


@given(token_ids, token_ids, salts, salts, adapters, adapters)
def test_keys_agree_exactly_where_prefix_tenant_and_adapter_do(
    a, b, salt_a, salt_b, adapter_a, adapter_b
) -> None:
    """Isolation: keys of different salts or adapters never match, whatever the tokens."""
    maker = make_maker()
    one = maker.keys(a, salt=salt_a, adapter=adapter_a)
    two = maker.keys(b, salt=salt_b, adapter=adapter_b)
    same_name = (salt_a, adapter_a) == (salt_b, adapter_b)
    for first, second in ((one.own(OWN), two.own(OWN)), (one.canonical, two.canonical)):
        for i in range(min(len(first), len(second))):
            end = 16 * (i + 1)
            assert (first[i] == second[i]) == (same_name and a[:end] == b[:end])
    assert not set(one.own(OWN)) & set(one.canonical)


@given(st.binary(min_size=1, max_size=64))
def test_a_tenants_salt_is_one_that_vllm_takes(salt: bytes) -> None:
    """Its `validate_cache_salt`: at most 128 characters, and none of these."""
    name = namespace_of(salt)
    assert 0 < len(name) <= 128
    assert not {*"@/\\\0"} & {*name}


def test_canonical_keys_can_be_made_block_by_block_from_a_parent() -> None:
    """As events come in: with a parent and the tokens after it."""
    tokens = tuple(range(100))
    hasher = CanonicalHasher(key=KEY, model="m")
    root = hasher.root(namespace=namespace_of(b"salt"), adapter="x")
    first = hasher.extend(root, token_bytes(tokens[:32]))
    rest = hasher.extend(first[-1], token_bytes(tokens[32:]))
    assert first + rest == list(make_maker().keys(tokens, salt=b"salt", adapter="x").canonical)


def test_canonical_keys_of_other_models_and_of_other_secrets_differ() -> None:
    tokens = tuple(range(32))
    other = PromptKeyMaker(key=KEY[::-1], model="m")
    names = [make_maker(), make_maker(model="n"), other]
    assert len({maker.keys(tokens).canonical[0] for maker in names}) == 3


def test_a_prompt_has_keys_of_every_identity_that_it_may_be_computed_by() -> None:
    keys = make_maker().keys(tuple(range(64)))
    rounded = BlockHasher(key=KEY, identity="m int8")
    assert len({*keys.own(OWN), *keys.own(rounded), *keys.canonical}) == 12
    assert keys.own(rounded) is keys.own(rounded), "hashed once"


def test_a_tenants_public_blocks_are_anybodys_to_our_engine_only() -> None:
    maker, tokens = make_maker(), tuple(range(64))
    a = maker.keys(tokens, salt=b"a", public_tokens=40)
    b = maker.keys(tokens, salt=b"b", public_tokens=40)
    assert [x == y for x, y in zip(a.own(OWN), b.own(OWN), strict=True)] == [True, True, False, False]
    assert not set(a.canonical) & set(b.canonical)
