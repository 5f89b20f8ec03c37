import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.detokenizer import StopChecker


def naive(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The first character at which some stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def watched(deltas: list[str], stops: list[str], *, include: bool) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include_stop=include)
    shown = []
    for delta in deltas:
        safe, match = checker.push(delta)
        shown.append(safe)
        if match is not None:
            return [*shown, checker.finish()], match
    return [*shown, checker.finish()], None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


stop_strings = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


@given(
    text=st.text(alphabet="ab\nc", max_size=40),
    stops=stop_strings,
    cuts=st.lists(st.integers(0, 40), max_size=40),
    include=st.booleans(),
)
def test_any_split_stops_where_the_whole_text_does(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    shown, match = watched(split(text, cuts), stops, include=include)
    assert ("".join(shown), match) == naive(text, stops, include=include)


@given(text=st.text(alphabet="abc", max_size=30), stops=stop_strings)
def test_no_more_is_held_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        safe, match = checker.push(char)
        if match is not None:
            return
        shown += safe
        held = text[len(shown) : end]
        suffixes = [text[start:end] for start in range(end)]
        possible = [s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops)]
        assert held == max(possible, key=len, default="")


@pytest.mark.parametrize(
    ("deltas", "stops", "expected"),
    [
        (["one\n", "\ntwo"], ["\n\n"], (["one", "", ""], "\n\n")),
        (["a<", "|", "en", "d|", "> b"], ["<|end|>"], (["a", "", "", "", "", ""], "<|end|>")),
        (["a<|e", "x"], ["<|end|>"], (["a", "<|ex", ""], None)),
        (["abc"], ["abc", "b"], (["a", ""], "b")),
        (["abc"], ["bc", "abc", "c"], (["", ""], "abc")),
        (["text"], [], (["text", ""], None)),
        (["ends with S", ""], ["STOP"], (["ends with ", "", "S"], None)),
    ],
)
def test_examples(deltas: list[str], stops: list[str], expected: tuple[list[str], str | None]) -> None:
    assert watched(deltas, stops, include=False) == expected


def test_include_stop_keeps_the_match_and_drops_the_rest() -> None:
    assert watched(["a END b"], ["END"], include=True) == (["a END", ""], "END")


def test_a_spent_checker_takes_no_more() -> None:
    checker = StopChecker(["x"])
    checker.push("x")
    with pytest.raises(AssertionError):
        checker.push("y")


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopChecker(["ok", ""])
