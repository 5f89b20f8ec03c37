import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.openai_validate import TooManyValues, repeated_key


class Pairs(list):
    """An object as it is written: keys may repeat."""


KEYS = st.text(max_size=3) | st.sampled_from(['"', "\\", "{", "}", "é", "a:"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEYS, inner), max_size=4).map(Pairs),
)


def written(value, ascii_only):
    if isinstance(value, Pairs):
        pairs = [f"{json.dumps(k, ensure_ascii=ascii_only)} : {written(v, ascii_only)}" for k, v in value]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(item, ascii_only) for item in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def repeats(value):
    if isinstance(value, Pairs):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(repeats(inner) for _, inner in value)
    return isinstance(value, list) and any(repeats(item) for item in value)


@given(VALUES, st.booleans())
def test_finds_what_is_repeated_and_nothing_else(value, ascii_only):
    found = repeated_key(written(value, ascii_only).encode(), 1000)
    assert (found is not None) == repeats(value)


def test_names_the_key():
    assert repeated_key(b'{"a":{"b":1},"b":[{"c":1,"c":2}]}', 100) == "c"
    assert repeated_key(rb'{"b":1,"\u0062":2}', 100) == "b"


def test_stops_at_the_bound():
    with pytest.raises(TooManyValues):
        repeated_key(b"[" + b"[]," * 100 + b"[]]", 50)
