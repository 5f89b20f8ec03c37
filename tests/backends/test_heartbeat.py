from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.silence import Beat, Heartbeat


def verdicts(received: str, **limits: int) -> list[Beat]:
    """One beat for each character: "." was silent, anything else was heard."""
    heartbeat = Heartbeat(**{"doubt_after": 2, "give_up_after": 4, **limits})
    return [heartbeat.beat(received=mark != ".") for mark in received]


def test_a_worker_is_asked_then_doubted_then_given_up() -> None:
    assert verdicts("x....") == [Beat.NOTHING, Beat.ASK, Beat.DOUBT, Beat.DOUBT, Beat.GIVE_UP]


def test_one_that_answers_is_asked_every_other_beat_and_never_doubted() -> None:
    assert verdicts(".x.x.x") == [Beat.ASK, Beat.NOTHING] * 3


def test_one_that_is_heard_again_is_trusted_again() -> None:
    assert verdicts("...x.x") == [Beat.ASK, Beat.DOUBT, Beat.DOUBT, Beat.TRUST, Beat.ASK, Beat.NOTHING]


@given(st.text(".x", max_size=60), st.integers(2, 5), st.integers(1, 5))
def test_doubt_begins_and_ends_once_and_nobody_is_given_up_without_it(
    received: str, doubt: int, more: int
) -> None:
    limits = {"doubt_after": doubt, "give_up_after": doubt + more}
    doubted = False
    for mark, verdict in zip(received, verdicts(received, **limits), strict=True):
        assert (verdict is Beat.TRUST) == (doubted and mark == "x")
        doubted = (doubted or verdict is Beat.DOUBT) and verdict is not Beat.TRUST
        if verdict is Beat.GIVE_UP:
            assert doubted
            return
    assert "." * (doubt + more) not in received
