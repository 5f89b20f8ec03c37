"""The rows of a batch: a state is kept while its request has no row, and is read again only if it must be."""

import threading
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("llguidance")

from demo_grammars import tokens

from penstock.engine.grammar.answer import GrammarAnswer
from penstock.engine.grammar.compiler import CompiledGrammar, compile_grammar
from penstock.engine.grammar.rows import KEPT_MAX, GrammarRows
from penstock.protocol.worker_parts import Grammar
from penstock.schedule.plan import NewRow
from penstock.types import RequestId, SamplingParams

PROMPT = [5, 6, 7]
FORM = msgspec.json.encode({"regex": "([ab][cd])*"})


@cache
def letters() -> CompiledGrammar:
    return compile_grammar(Grammar(form=FORM), tokens())


class Rows(GrammarRows):
    """One row, and the tokens that its runner remembers. Counts the tokens of answers that are read again."""

    def __init__(self) -> None:
        self.remembered = [*PROMPT]
        super().__init__(1, tokens(), 1, lambda _row, first, end: self.remembered[first:end])

    def start(self, answer: list[int], name: str = "r", grammar: CompiledGrammar | None = None) -> None:
        self.remembered = PROMPT + answer
        how = SamplingParams()
        row = NewRow(RequestId(name), 0, self.remembered, len(PROMPT), how, grammar=grammar or letters())
        self.enter(row)

    def allowed(self) -> list[int]:
        position = np.array([len(self.remembered)])
        masks = self.masks(np.array([0]), position)
        assert masks is not None
        bits = np.unpackbits(masks.bits[masks.of_row[0]].view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def draw(self) -> None:
        token = next(each for each in self.allowed() if each not in tokens().eos_ids)
        position = np.array([len(self.remembered)])
        assert not self.take(np.array([0]), position, np.array([token]))
        self.remembered.append(token)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    take = GrammarAnswer.take

    def counted(self: GrammarAnswer, token_id: int) -> None:
        found.append(token_id)
        take(self, token_id)

    monkeypatch.setattr(GrammarAnswer, "take", counted)
    return found


def test_a_request_that_comes_back_is_not_read_again(taken: list[int]) -> None:
    rows = Rows()
    rows.start([])
    for _ in range(6):
        rows.draw()
    answer, allowed = rows.remembered[len(PROMPT) :], rows.allowed()
    rows.leave(0)
    taken.clear()
    rows.start(answer)
    assert rows.allowed() == allowed
    assert not taken
    rows.draw()
    longer, allowed = rows.remembered[len(PROMPT) :], rows.allowed()
    fresh = Rows()
    fresh.start(longer)
    assert fresh.allowed() == allowed


def spelt(text: str) -> list[int]:
    ids = {tokens().tokenizer.token_bytes(i): i for i in range(300)}
    return [ids[each.encode()] for each in text]


@pytest.mark.parametrize("what", ["name", "answer", "grammar", "nothing"])
def test_only_the_same_answer_of_the_same_request_is_not_read(taken: list[int], what: str) -> None:
    rows = Rows()
    rows.start(spelt("acbd"))
    rows.draw()
    answer = rows.remembered[len(PROMPT) :]
    rows.leave(0)
    taken.clear()
    grammar = compile_grammar(Grammar(form=FORM), tokens()) if what == "grammar" else letters()
    name = "s" if what == "name" else "r"
    rows.start(spelt("bcbd") + answer[4:] if what == "answer" else answer, name, grammar)
    assert rows.allowed()
    assert len(taken) == (0 if what == "nothing" else 5)


class Free(GrammarRows):
    """Rows whose grammar allows any text without "x" and "y"; they draw without a mask once one was wide."""

    def __init__(self, *answers: str, **how: Any) -> None:
        self.remembered = [PROMPT + spelt(each) for each in answers]
        super().__init__(len(answers), tokens(), 1, self.known_tokens, asks_refused=True)
        grammar = compile_grammar(Grammar(form=msgspec.json.encode({"regex": "[^xy]{3,}"})), tokens())
        for row, each in enumerate(self.remembered):
            sampling = SamplingParams(**how)
            self.enter(NewRow(RequestId(f"r{row}"), row, each, len(PROMPT), sampling, grammar=grammar))

    def known_tokens(self, row: int, first: int, end: int) -> list[int]:
        return self.remembered[row][first:end]

    def step(self, text: str, *again: str) -> list[int]:
        """One letter for each row, then one for each that is refused; the rows that drew from masks."""
        rows = np.arange(len(self.remembered))
        positions = np.array([len(each) for each in self.remembered])
        masks, drawn = self.masks(rows, positions), np.array(spelt(text))
        masked = [] if masks is None else np.flatnonzero(masks.of_row >= 0).tolist()
        for letters in again:
            refused = self.refused(drawn)
            assert refused is not None
            index, masks = refused
            for place, wrong, right in zip(masks.of_row, drawn[index].tolist(), spelt(letters), strict=True):
                bits = masks.bits[place].view(np.uint32)
                assert not bits[wrong // 32] >> (wrong % 32) & 1
                assert bits[right // 32] >> (right % 32) & 1
            drawn[index] = spelt(letters)
        assert self.refused(drawn) is None
        assert not self.take(rows, positions, drawn)
        for each, token_id in zip(self.remembered, drawn.tolist(), strict=True):
            each.append(token_id)
        return masked


def test_a_row_whose_mask_allowed_most_tokens_draws_without_one_until_it_is_refused() -> None:
    rows = Free("", "a")
    assert rows.step("ab") == [0, 1], "the first mask is computed"
    assert rows.step("bc") == []
    assert rows.step("xc", "c") == []
    assert rows.step("de") == [], "one that was refused was wide, too"
    assert [spelt("abcd"), spelt("abcce")] == [each[len(PROMPT) :] for each in rows.remembered]


def test_a_row_that_is_refused_twice_draws_from_the_mask() -> None:
    rows = Free("", "a")
    rows.step("ab")
    assert rows.step("xx", "yc", "c") == []
    assert rows.step("cy", "d") == [], "it was wide all the same"
    assert [spelt("acc"), spelt("abcd")] == [each[len(PROMPT) :] for each in rows.remembered]


def test_a_row_of_which_nothing_but_a_refused_token_is_left_draws_from_the_mask() -> None:
    """As where `allowed_token_ids` leaves one token: the sampler finds nothing else."""
    rows = Free("")
    rows.step("a")
    position = np.array([len(rows.remembered[0])])
    assert rows.masks(np.array([0]), position) is None
    drawn = np.array(spelt("x"))
    assert rows.refused(drawn) is not None
    drawn[0] = -1
    refused = rows.refused(drawn)
    assert refused is not None
    _, masks = refused
    allowed = np.unpackbits(masks.bits[masks.of_row[0]].view(np.uint8), bitorder="little")
    assert not allowed[spelt("xy")].any()
    assert allowed[spelt("abc")].all()


@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_tokens": 2}])
def test_a_row_whose_draw_depends_on_other_tokens_has_a_mask_every_time(how: dict[str, Any]) -> None:
    rows = Free("", **how)
    assert [rows.step("a"), rows.step("b"), rows.step("c")] == [[0]] * 3


def test_a_step_that_fails_behind_a_draw_without_a_mask_is_made_again() -> None:
    rows = Free("")
    rows.step("a")
    position = np.array([len(rows.remembered[0])])
    assert rows.masks(np.array([0]), position) is None
    assert rows.refused(np.array(spelt("b"))) is None
    # The step runs out of memory, and another token is drawn in its place.
    assert rows.step("c") == [0]
    assert rows.step("d") == []
    rows.leave(0)
    assert [known for _, known in rows._kept.values()] == [spelt("acd")]


def test_few_states_are_kept() -> None:
    rows = Rows()
    for number in range(KEPT_MAX + 5):
        rows.start([], f"r{number}")
        rows.draw()
        rows.leave(0)
    assert len(rows._kept) == KEPT_MAX


def test_a_row_that_is_left_while_its_answer_is_read_does_not_wait_for_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, begun, count, long = Rows(), threading.Event(), [0], 1_000_000

    def take(_answer: GrammarAnswer, _token_id: int) -> None:
        count[0] += 1
        begun.set()

    monkeypatch.setattr(GrammarAnswer, "take", take)
    rows.start([1] * long)
    assert begun.wait(30)
    rows.leave(0)
    assert count[0] < long
    rows.start([])
    assert rows.allowed()
