"""The identity of a computation: everything that decides its bits is in it, and nothing else."""

import msgspec
import pytest

from penstock.kv.hashing import Computation

ONE = Computation(checkpoint="c", tokenizer="t", dtype="bfloat16", kv_dtype="bfloat16", kernels="native avx2")


def test_it_is_the_same_for_the_same() -> None:
    assert ONE.identity == msgspec.structs.replace(ONE).identity
    assert len(ONE.identity) == 32
    assert int(ONE.identity, 16)


@pytest.mark.parametrize("field", Computation.__struct_fields__)
def test_each_part_counts(field: str) -> None:
    assert msgspec.structs.replace(ONE, **{field: "other"}).identity != ONE.identity


def test_parts_that_spell_the_same_when_joined_differ() -> None:
    joined = msgspec.structs.replace(ONE, checkpoint="ct", tokenizer="")
    assert joined.identity != ONE.identity
