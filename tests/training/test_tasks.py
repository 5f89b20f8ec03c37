"""The task generators: deterministic, honest about the hold-out, and right in what they teach."""

from __future__ import annotations

import json
import re
from operator import add, mul, sub, truediv
from random import Random

import pytest

from training.conversations import conversations
from training.holdout import SHOWCASE, draw, held_out_exchanges, is_held_out, normal
from training.tasks.base import Persona
from training.tasks.registry import TASKS

DEMO = Persona("penstock-demo", "12M")
MINI = Persona("penstock-demo-mini", "3M")


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_every_exchange(task: str) -> None:
    first, second = ([draw(rng, task, DEMO) for _ in range(50)] for rng in (Random(3), Random(3)))
    assert first == second
    assert first != [draw(Random(4), task, DEMO) for _ in range(50)]


@pytest.mark.parametrize("task", TASKS)
def test_training_and_evaluation_prompts_are_disjoint(task: str) -> None:
    rng = Random(5)
    trained = {normal(draw(rng, task, DEMO).prompt) for _ in range(3000)}
    evaluated = {normal(e.prompt) for e in held_out_exchanges(task, DEMO, 120, seed=7)}
    assert len(evaluated) == 120
    assert not trained & evaluated


def test_no_user_turn_of_a_training_conversation_is_held_out() -> None:
    stream = conversations(1, DEMO)
    for _ in range(500):
        users = [message.content for message in next(stream).messages if message.role == "user"]
        assert not any(is_held_out(user) for user in users)


def test_hold_out_ignores_case_and_punctuation() -> None:
    prompts = [
        f"What is the capital of {country}?" for country in ("Peru", "Chile", "Kenya", "Nepal", "Cuba")
    ]
    for prompt in prompts:
        assert is_held_out(prompt) == is_held_out(prompt.lower().rstrip("?"))


def test_showcase_prompts_are_never_evaluated() -> None:
    assert not any(is_held_out(prompt) for prompt in SHOWCASE)


def test_arithmetic_answers_are_right() -> None:
    rng = Random(6)
    for _ in range(500):
        a, operation, b, _, result = draw(rng, "arithmetic", DEMO).answer.split()
        compute = {"+": add, "-": sub, "*": mul, "/": truediv}[operation]
        assert compute(int(a), int(b)) == int(result)


def test_extraction_answers_quote_the_prompt() -> None:
    rng = Random(7)
    for _ in range(300):
        exchange = draw(rng, "extract", DEMO)
        for key, value in json.loads(exchange.answer).items():
            assert key in exchange.prompt
            assert str(value) in exchange.prompt


def test_tool_calls_fit_an_offered_schema() -> None:
    rng = Random(8)
    for _ in range(300):
        exchange = draw(rng, "tool_call", DEMO)
        found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", exchange.answer)
        assert found is not None
        call = json.loads(found[1])
        schema = {tool["name"]: tool for tool in exchange.tools}[call["name"]]
        assert set(call["arguments"]) == set(schema["parameters"]["properties"])


def test_each_model_knows_its_own_name_and_size() -> None:
    for persona in (DEMO, MINI):
        rng = Random(9)
        answers = {draw(rng, "smalltalk", persona).answer for _ in range(2000)}
        assert any(f"I am {persona.name}, a {persona.size}-parameter" in answer for answer in answers)
        assert not any("{" in answer for answer in answers)


def test_some_conversations_fill_the_context() -> None:
    stream = conversations(2, DEMO)
    turns = [len(next(stream).messages) for _ in range(3000)]
    assert max(turns) >= 50
    assert sum(count > 2 for count in turns) > 1000
