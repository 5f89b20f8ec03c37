"""A prompt's keys: the engine's own names cut short, and canonical ones that depend on everything that matters."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.hashing import BlockHasher, token_bytes
from penstock.kv.host_tier import HostLimits
from penstock.kv.manager import KVManager
from penstock.kv.prompt_keys import CanonicalHasher, PromptKeyMaker, namespace_of, own_keys

KEY = b"0123456789abcdef"
OWN = BlockHasher(key=KEY, model="m", kv_dtype="float32")


def make_maker(*, own: BlockHasher | None = OWN, model: str = "m") -> PromptKeyMaker:
    maker = PromptKeyMaker(key=KEY, model=model)
    if own is not None:
        maker.own[KEY] = own
    return maker


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
    assert list(keys.own(KEY)) == own_keys(table.hashes[: keys.num_blocks])


@given(token_ids, token_ids, salts, salts, adapters, adapters)
def test_keys_agree_exactly_where_prefix_tenant_and_adapter_do(
    a, b, salt_a, salt_b, adapter_a, adapter_b
) -> None:
    """Isolation: keys of different salts or adapters never match, whatever the tokens."""
    maker = make_maker()
    one = maker.keys(a, salt=salt_a, adapter=adapter_a)
    two = maker.keys(b, salt=salt_b, adapter=adapter_b)
    same_name = (salt_a, adapter_a) == (salt_b, adapter_b)
    for first, second in ((one.own(KEY), two.own(KEY)), (one.canonical, two.canonical)):
        for i in range(min(len(first), len(second))):
            end = 16 * (i + 1)
            assert (first[i] == second[i]) == (same_name and a[:end] == b[:end])
    assert not set(one.own(KEY)) & set(one.canonical)


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


def test_there_are_no_own_keys_until_the_model_is_known() -> None:
    maker, tokens = make_maker(own=None), tuple(range(32))
    keys = maker.keys(tokens)
    assert keys.own(KEY) == ()
    assert len(keys.canonical) == 2
    maker.own[KEY] = OWN
    assert len(keys.own(KEY)) == 2


def test_a_tenants_public_blocks_are_anybodys_to_our_engine_only() -> None:
    maker, tokens = make_maker(), tuple(range(64))
    a = maker.keys(tokens, salt=b"a", public_tokens=40)
    b = maker.keys(tokens, salt=b"b", public_tokens=40)
    assert [x == y for x, y in zip(a.own(KEY), b.own(KEY), strict=True)] == [True, True, False, False]
    assert not set(a.canonical) & set(b.canonical)
