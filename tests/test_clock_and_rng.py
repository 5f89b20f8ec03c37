import os

from hypothesis import given
from hypothesis import strategies as st

from penstock import rng
from penstock.clock import NS_PER_S, ManualClock, SystemClock


def test_the_system_clock_never_goes_back_and_knows_the_date() -> None:
    clock = SystemClock()
    seen = [clock.now_ns() for _ in range(100)]
    assert seen == sorted(seen)
    assert clock.wall_ns() > 1_700_000_000 * NS_PER_S


def test_a_manual_clock_moves_both_of_its_hands_and_only_when_told() -> None:
    clock = ManualClock(now_ns=5, wall_ns=1_000)
    assert (clock.now_ns(), clock.wall_ns()) == (5, 1_000)
    clock.advance(7)
    assert (clock.now_ns(), clock.wall_ns()) == (12, 1_007)


@given(st.integers(0, 2**63), st.text(max_size=20), st.text(max_size=20))
def test_streams_repeat_by_name_and_differ_between_names(seed: int, name: str, other: str) -> None:
    def draw(which: str) -> list[int]:
        stream = rng.stream(seed, which)
        return [stream.getrandbits(64) for _ in range(4)]

    assert draw(name) == draw(name)
    if name != other:
        assert draw(name) != draw(other)


def test_ids_never_repeat_and_a_seed_fixes_them() -> None:
    source, other = rng.IdSource(), rng.IdSource()
    ids = {s.take("req") for s in (source, other) for _ in range(1000)}
    assert len(ids) == 2000
    assert rng.IdSource(seed=1).take("chatcmpl") == rng.IdSource(seed=1).take("chatcmpl")


def test_entropy_has_the_promised_sizes() -> None:
    assert len(rng.fresh_key(32)) == 32
    assert 0 <= rng.fresh_seed() < 2**63
    assert rng.fresh_token() != rng.fresh_token()


def test_fresh_seeds_never_repeat_nor_are_shared_with_a_forked_process() -> None:
    seeds = {rng.fresh_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**63
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, b"".join(rng.fresh_seed().to_bytes(8, "big") for _ in range(100)))
        finally:
            os._exit(0)  # What was not written is missed.
    mine = {rng.fresh_seed() for _ in range(100)}
    assert os.waitpid(child, 0)[1] == 0
    reported = os.read(reader, 800)
    os.close(reader)
    os.close(writer)
    theirs = {int.from_bytes(reported[i : i + 8], "big") for i in range(0, 800, 8)}
    assert len(theirs) == 100
    assert not theirs & (mine | seeds)
