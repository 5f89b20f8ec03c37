"""Probes judge by majority or by the first answer; doubts are probed, confirmed, ejected within bounds, and
end.
"""

import math

import pytest

from penstock.clock import NS_PER_S
from penstock.policy.resilience.anomalies import (
    OUT_MAX_NS,
    OUT_NS,
    PROBE_REST,
    TABLE,
    WEIGHTS,
    Anomalies,
    Sign,
    Standing,
)
from penstock.policy.resilience.probes import TOLERANCE, Goldens, ProbeAnswer, ProbeToken, distance

BEAT_NS = 30 * NS_PER_S
S = Standing


def answer(shift: float = 0.0, text: str = "ab", **tops: float) -> ProbeAnswer:
    """Tokens "a" and "b", or others, whose log-probabilities are off by `shift`."""
    top = {"a": -0.1, "b": -2.5, "c": -4.0} | tops
    given = {name.encode(): logprob + shift for name, logprob in top.items()}
    return ProbeAnswer(tokens=tuple(ProbeToken(each.encode(), given) for each in text))


RIGHT, WRONG = answer(), answer(2.0)


class Fleet:
    def __init__(self, num_workers: int, identity: str = "i") -> None:
        self.now_ns = 0
        self.anomalies = Anomalies(BEAT_NS)
        self.answers = {f"w{i}": RIGHT for i in range(num_workers)}
        for name in self.answers:
            self.anomalies.worker(0, "m", name, ready=True, identity=identity)

    def beat(self) -> dict[str, Standing]:
        """Let a beat pass, with the probes at its end and those that doubts ask for. Changes."""
        self.now_ns += BEAT_NS
        changes = dict[str, Standing]()
        while due := self.anomalies.due(self.now_ns):
            for name in due:
                self.anomalies.probed(self.now_ns, name, self.answers[name])
            changes |= {each.worker: each.standing for each in self.anomalies.tick(self.now_ns)}
        return changes

    def out(self) -> set[str]:
        return {name for name in self.answers if self.anomalies.weight(name) == 0}


def test_batches_may_move_log_probabilities_and_near_ties_but_damage_is_found():
    assert distance(RIGHT, RIGHT) == 0
    assert distance(RIGHT, answer(0.9 * TOLERANCE)) < TOLERANCE
    tie, other = answer(a=-0.7, b=-0.75), answer(a=-0.75, b=-0.7, text="bx")
    assert distance(tie, other) < TOLERANCE, "which of two likely tokens comes is chance"
    assert distance(RIGHT, answer(2.0)) == 2.0
    unnamed = ProbeAnswer(tokens=(ProbeToken(b"z", {b"z": -0.1, b"y": -6.0}),))
    assert distance(RIGHT, unnamed) > 2, "a likely token that is not even named"
    for damaged in (ProbeAnswer(tokens=()), answer(math.nan), answer(math.inf)):
        assert distance(RIGHT, damaged) == math.inf


def test_three_workers_are_judged_by_most_of_them_and_fewer_by_the_first_answer():
    goldens = Goldens()
    assert goldens.judge("i", "bad", WRONG, 3) == (None, 0.0), "one of three has answered"
    assert goldens.judge("i", "w1", RIGHT, 3)[0] is None
    assert goldens.judge("i", "w2", RIGHT, 3) == (True, 0.0)
    assert goldens.judge("i", "bad", WRONG, 3) == (False, 2.0)
    goldens.forget("i", "w1")
    goldens.forget("unknown", "w1")
    alone = Goldens()
    assert alone.judge("i", "w0", RIGHT, 1)[0] is True
    assert alone.judge("i", "w0", WRONG, 1) == (False, 2.0)
    assert alone.judge("other", "w0", WRONG, 1)[0] is True, "another identity computes something else"


def test_a_wrong_worker_is_out_within_two_beats_and_back_after_right_answers():
    fleet = Fleet(4)
    assert fleet.beat() == {}
    assert fleet.beat() == {}
    fleet.answers["w2"] = WRONG
    assert fleet.beat() == {"w2": S.EJECTED}
    assert list(fleet.anomalies.certain()) == [("m", "wrong")]
    assert "golden" in fleet.anomalies.get("w2").why
    assert fleet.beat() == {}
    fleet.answers["w2"] = RIGHT
    assert [fleet.beat() for _ in range(4)] == [{}, {}, {"w2": S.RETURNING}, {"w2": S.WELL}]
    assert list(fleet.anomalies.certain()) == []
    assert fleet.out() == set()


def test_one_wrong_answer_alone_is_doubt_and_a_fault_of_the_engine_counts_as_wrong():
    anomalies = Anomalies(BEAT_NS)
    anomalies.worker(0, "m", "w", ready=True, identity="i")
    assert anomalies.due(BEAT_NS - 1) == []
    assert anomalies.due(BEAT_NS) == ["w"]
    assert anomalies.due(2 * BEAT_NS) == [], "it is under way"
    assert anomalies.probed(BEAT_NS, "w", RIGHT) == "right"
    assert anomalies.probed(BEAT_NS, "w", None, fault="the logits are not numbers") == "wrong"
    assert [each.standing for each in anomalies.tick(BEAT_NS)] == [S.DOUBTED]
    assert anomalies.due(BEAT_NS) == ["w"], "at once"
    assert anomalies.weight("w") == 0.5
    assert anomalies.probed(BEAT_NS, "w", RIGHT) == "right"
    assert [each.standing for each in anomalies.tick(BEAT_NS)] == [S.WELL]
    assert anomalies.probed(BEAT_NS, "w", None, why="it was busy") == "it was busy"
    assert anomalies.tick(BEAT_NS) == []
    assert anomalies.probed(BEAT_NS, "unknown", RIGHT) == "gone"


@pytest.mark.parametrize(("num_workers", "num_out"), [(1, 0), (2, 0), (3, 1), (9, 1), (10, 2)])
def test_at_most_a_fifth_of_a_pool_is_out(num_workers, num_out):
    fleet = Fleet(num_workers)
    fleet.beat()
    bad = [f"w{i}" for i in range((num_workers - 1) // 2 if num_workers > 2 else 1)]
    for name in bad:
        fleet.answers[name] = WRONG
    for _ in range(3):
        fleet.beat()
    assert len(fleet.out()) == num_out
    assert len(list(fleet.anomalies.certain())) == len(bad), "who may not go is found all the same"


def test_who_is_wrong_goes_before_who_is_slow():
    fleet = Fleet(4)
    fleet.beat()
    slow = fleet.anomalies.get("w0")
    peers = fleet.anomalies._groups.setdefault(slow.group, type("P", (), {
        "slowness": lambda *_: 1.2, "trust": lambda *_, **__: None, "judge": list, "num_quiet": lambda *_: 0,
    })())  # fmt: skip
    fleet.anomalies._slow(fleet.now_ns, "w0", peers)
    fleet.anomalies._slow(fleet.now_ns, "w0", peers)
    assert fleet.out() == {"w0"}
    fleet.answers["w3"] = WRONG
    fleet.beat()
    assert fleet.out() == {"w3"}
    assert fleet.anomalies.get("w0").standing is S.RETURNING
    fleet.now_ns += OUT_NS
    fleet.anomalies.tick(fleet.now_ns)
    assert fleet.out() == {"w3"}


def test_a_new_process_is_a_stranger_and_a_beat_of_0_watches_nothing():
    fleet = Fleet(3)
    fleet.answers["w0"] = WRONG
    for _ in range(3):
        fleet.beat()
    assert fleet.out() == {"w0"}
    fleet.anomalies.worker(fleet.now_ns, "m", "w0", ready=True, epoch=2, identity="i")
    assert fleet.out() == set()
    fleet.anomalies.gone("w0")
    assert fleet.anomalies.get("w0") is None
    assert fleet.anomalies.weight("w0") == 1.0
    off = Anomalies(0)
    off.worker(0, "m", "w", ready=True, identity="i")
    assert off.due(10**18) == []
    watched = Anomalies(30 * NS_PER_S)
    watched.worker(0, "m", "w", ready=True, beats=0)
    assert watched.due(10**18) == []


def test_without_an_identity_a_probe_takes_the_time_and_blames_nobody():
    watched = Anomalies(30 * NS_PER_S)
    watched.worker(0, "m", "w", ready=True, beats=20)
    assert (watched.due(599 * NS_PER_S), watched.due(600 * NS_PER_S)) == ([], ["w"])
    assert watched.probed(601 * NS_PER_S, "w", ProbeAnswer(tokens=(), ttft_ns=7)) == "answered"
    assert watched.get("w").answer.ttft_ns == 7
    assert watched.probed(601 * NS_PER_S, "w", None, fault="NaN") == "NaN"
    assert watched.probed(601 * NS_PER_S, "w", None) == "no answer"
    assert (watched.get("w").standing, list(watched.certain())) == (Standing.WELL, [])


def test_every_standing_has_its_weight_and_every_move_its_row():
    assert {standing for standing, _ in TABLE} == set(Standing) == set(WEIGHTS)
    assert {sign for _, sign in TABLE} == set(Sign)


def test_a_worker_that_is_out_returns_where_too_few_others_are_left():
    fleet = Fleet(3)
    fleet.beat()
    fleet.answers["w0"] = WRONG
    while not fleet.out():
        fleet.beat()
    fleet.anomalies.gone("w1")
    fleet.anomalies.worker(fleet.now_ns, "m", "w2", ready=False, identity="i")
    assert [(each.worker, each.standing) for each in fleet.anomalies.tick(fleet.now_ns)] == [
        ("w0", S.RETURNING)
    ]


def test_a_damaged_golden_answer_ends_with_the_process_that_gave_it():
    fleet = Fleet(1)
    fleet.answers["w0"] = WRONG
    fleet.beat()
    fleet.anomalies.worker(fleet.now_ns, "m", "w0", ready=True, identity="i", epoch=2)
    fleet.answers["w0"] = RIGHT
    assert fleet.beat() == {}
    assert fleet.anomalies.weight("w0") == 1
    assert list(fleet.anomalies.certain()) == []


def test_a_slow_probe_is_followed_by_a_long_rest():
    anomalies = Anomalies(BEAT_NS)
    anomalies.worker(0, "m", "w0", ready=True, identity="i")
    assert anomalies.due(BEAT_NS) == ["w0"]
    anomalies.probed(BEAT_NS + 15 * NS_PER_S, "w0", None, why="no answer")
    assert anomalies.due(BEAT_NS + 300 * NS_PER_S) == []
    assert anomalies.due(BEAT_NS + (15 + PROBE_REST * 15) * NS_PER_S) == ["w0"]


def test_a_doubt_without_load_ends_by_itself_and_does_not_confirm_another():
    fleet = Fleet(3)
    found = fleet.anomalies.get("w0")
    fleet.anomalies._flag(0, "w0", found, "slow", "slow")
    found.is_certain = True
    fleet.anomalies._flag(0, "w0", found, "wrong", "one wrong answer")
    assert not found.is_certain
    fleet.anomalies._flag(0, "w0", found, "slow", "slow")
    assert fleet.anomalies.tick(OUT_MAX_NS - 1)[-1].standing is S.DOUBTED
    assert fleet.anomalies.tick(OUT_MAX_NS)[-1].standing is S.WELL
