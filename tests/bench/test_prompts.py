from itertools import islice
from pathlib import Path

import pytest

from penstock.bench.prompts import PromptPlan, made, read_dataset
from penstock.errors import ConfigError


def texts(count: int, **changes: object) -> list[str]:
    plan = {"seed": 7, "run": "c1", "prompt_tokens": 100, "shared_tokens": 0, "tokens_per_word": 1.25}
    plan |= {"overhead_tokens": 5.0, **changes}
    return [str(prompt.messages[0]["content"]) for prompt in islice(made(PromptPlan(**plan)), count)]  # type: ignore[arg-type]


def test_the_same_seed_makes_the_same_prompts() -> None:
    assert texts(5) == texts(5)
    assert texts(5) != texts(5, seed=8)
    assert not set(texts(5)) & set(texts(5, run="c8"))


def test_no_two_share_a_first_word() -> None:
    assert len({text.split()[0] for text in texts(100)}) == 100


def test_length_is_set_in_words() -> None:
    assert {len(text.split()) for text in texts(10)} == {76}  # (100 - 5) / 1.25
    assert {len(text.split()) for text in texts(3, prompt_tokens=1)} == {3}


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    first, second = texts(2, shared_tokens=50)
    assert first.split()[:40] == second.split()[:40]
    assert first.split()[40] != second.split()[40]
    assert len(first.split()) == 76


def test_a_dataset_is_read(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "hi", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "x"}]}\n')
    first, second = read_dataset(path)
    assert (first.messages[0]["content"], first.max_tokens) == ("hi", 3)
    assert (second.messages[0]["content"], second.max_tokens) == ("x", None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no rows"),
        ('\n{"prompt": 1}', "line 2: Expected"),
        ("{", "line 1"),
        ("{}", 'line 1: give either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "give either"),
        ('{"prompt": "a", "max_tokens": 0}', "at least 1"),
    ],
)
def test_a_wrong_dataset_names_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_dataset(path)


def test_a_missing_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl: No such file"):
        read_dataset(tmp_path / "absent.jsonl")
