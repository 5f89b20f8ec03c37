import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.routing import AutoModel
from penstock.policy.extras.complexity import AutoTerms, ComplexityRouter, Features, question_mark, words_of
from penstock.policy.placement.pick import ComplexityChoice

MODELS = (
    AutoModel(model="small", up_to=0.17),
    AutoModel(model="medium", up_to=0.53),
    AutoModel(model="large"),
)


def router(models=MODELS, terms: AutoTerms | None = None) -> ComplexityRouter:
    return ComplexityRouter(models, terms or AutoTerms())


def asked(*texts: str, **facts) -> Features:
    return Features(texts=texts, num_chars=sum(map(len, texts)), **facts)


def choose(deciding: ComplexityRouter, features: Features, may=lambda _: True) -> ComplexityChoice:
    choice = deciding.choose(features, may)
    assert choice is not None
    return choice


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("hi", "small"),
        ("What is the capital of France?", "small"),
        ("Translate to German: good morning", "small"),
        ("", "small"),
        (
            "Prove that the algorithm terminates, compare it with two others and justify which one is "
            "optimal; then " + "implement it in Rust with tests.",
            "large",
        ),
    ],
)
def test_plain_cases(text: str, model: str) -> None:
    assert choose(router(), asked(text)).model == model


def test_every_mark_shows_in_the_parts() -> None:
    choice = choose(
        router(),
        asked(
            "hello",
            "Why does this deadlock?\n```python\nlock.acquire()\n```\n" + "material " * 900,
            num_tools=4,
            num_tool_results=2,
        ),
    )
    assert dict(choice.parts).keys() >= {"code", "reasoning", "tokens", "tools", "turns", "question"}
    assert choice.complexity == pytest.approx(min(1.0, sum(value for _, value in choice.parts)))
    sizes = [abs(value) for _, value in choice.parts]
    assert sizes == sorted(sizes, reverse=True)


def test_explains_itself_on_one_ascii_line() -> None:
    choice = ComplexityChoice("small", 0.31, (("code", 0.2), ("tokens", 0.05), ("simple", -0.05)))
    assert choice.explain() == "complexity=0.31 (code .20, tokens .05, simple -.05)"
    assert ComplexityChoice("small", 0.0, ()).explain() == "complexity=0.00"


def test_a_tier_gets_no_less_than_its_model() -> None:
    medium = AutoModel(model="medium", up_to=0.53, tiers=("enterprise",))
    deciding = router((MODELS[0], medium, MODELS[2]))
    assert choose(deciding, asked("hi", tier="enterprise")).model == "medium"
    assert choose(deciding, asked("hi", tier="free")).model == "small"


def test_what_may_not_answer_is_passed_over_upwards_then_downwards() -> None:
    assert choose(router(), asked("hi"), lambda model: model != "small").model == "medium"
    hard = asked(
        "Prove it and compare the trade-offs step by step, then justify the strategy and its risks. " * 3
    )
    assert choose(router(), hard).model == "large"
    assert choose(router(), hard).passed_over == ()
    small = choose(router(), hard, lambda model: model == "small")
    assert (small.model, small.passed_over) == ("small", ("large", "medium"))
    assert router().choose(hard, lambda _: False) is None


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.text(max_size=300), max_size=6),
    num_chars=st.integers(0, 10**9),
    num_tools=st.integers(0, 10**6),
    num_results=st.integers(0, 10**6),
    tier=st.sampled_from(["", "free", "enterprise"]),
)
def test_any_request_has_one_answer(
    texts, num_chars: int, num_tools: int, num_results: int, tier: str
) -> None:
    features = Features(
        texts=texts, num_chars=num_chars, num_tools=num_tools, num_tool_results=num_results, tier=tier
    )
    one, other = choose(router(), features), choose(router(), features)
    assert one == other
    assert 0 <= one.complexity <= 1
    assert one.explain().isascii()
    assert one.explain().isprintable()


def test_what_is_looked_at_is_bounded() -> None:
    """Text beyond the bound changes nothing, and megabytes of hostile text cost what the bound costs."""
    deciding = router(terms=AutoTerms(text_chars_max=1000))
    short = Features(texts=["x " * 500], num_chars=10)
    long = Features(texts=["x " * 500 + "prove compare ``` " * 50_000], num_chars=10)
    assert deciding.parts(short) == deciding.parts(long)
    hostile = Features(texts=["(" * 4_000_000, "`" * 4_000_000, "a?" * 2_000_000], num_chars=10**7)
    assert deciding.parts(hostile) == deciding.parts(hostile)


def test_it_is_absent_unless_it_is_configured() -> None:
    look = "import sys, penstock.gateway.app; print(any('complexity' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_is_demanded_of_an_answer_makes_a_question_harder() -> None:
    plain, demanding = "Write about rivers", "Write exactly about rivers without names"
    marks = [question_mark(text, words_of(text.lower())) for text in (plain, demanding)]
    assert marks[0] < marks[1]


def test_the_first_message_is_no_turn_and_the_second_one_is() -> None:
    one, two = ("Which rivers?",), ("Which rivers?", "The long ones.")
    turns = [dict(router().parts(asked(*texts))).get("turns", 0.0) for texts in (one, two)]
    assert turns[0] == 0.0 < turns[1]
