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
