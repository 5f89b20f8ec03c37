"""Names of blocks by segments say the same as hashes over tokens do."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.hashing import BlockHasher, token_bytes
from penstock.sim.traffic.prompts import EOS, PromptBlockNames, Segment, content_tokens, prompt_tokens
from penstock.types import BLOCK_TOKENS

segments = st.lists(
    st.builds(Segment, st.integers(0, 3), st.sampled_from([1, 7, 16, 17, 40])), min_size=1, max_size=4
)
salts = st.sampled_from([b"", b"one", b"two"])


HASHER = BlockHasher(key=b"k" * 32, identity="m f")


def real_chain(prompt, salt, public_tokens):
    """The hashes that the engine gives these tokens: see `HashedPrefixCache`."""
    tokens = prompt_tokens(prompt)
    num_public = public_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    if not num_public:
        return HASHER.extend(HASHER.root(salt=salt), token_bytes(tokens))
    hashes = HASHER.extend(HASHER.public_root(), token_bytes(tokens[:num_public]))
    parent = HASHER.enter(hashes[-1], salt=salt)
    return hashes + HASHER.extend(parent, token_bytes(tokens[num_public:]))


@given(st.lists(st.tuples(segments, salts, st.sampled_from([0, 16, 20])), min_size=2, max_size=5))
def test_blocks_have_one_name_exactly_when_they_have_one_hash(prompts) -> None:
    names = PromptBlockNames(HASHER)
    pairs = set()
    for prompt, salt, public in prompts:
        public_tokens = min(public, sum(segment.tokens for segment in prompt))
        mine = names.keys(tuple(prompt), salt=salt, public_tokens=public_tokens)
        real = real_chain(prompt, salt, public_tokens)
        assert len(mine) == len(real)
        pairs.update(zip(mine, real, strict=True))
    assert len(pairs) == len({name for name, _ in pairs}) == len({digest for _, digest in pairs})


@given(st.integers(0, 2**60), st.integers(1, 200_000), st.data())
def test_a_piece_of_a_content_is_a_slice_of_it(content, length, data) -> None:
    whole = content_tokens(content, 0, length)
    start = data.draw(st.integers(0, length))
    assert len(whole) == length
    assert content_tokens(content, start, length) == whole[start:]
    assert EOS not in whole
