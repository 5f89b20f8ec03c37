"""A bench's result file names its command without the places of one machine."""

import pytest

from bench.harness import REPOSITORY, command_of


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--tree . ../elsewhere/old --json /srv/x/cost.json", "--tree . old --json cost.json"),
        ("--json docs/results/cost.json", "--json cost.json"),
        (
            "--fit docs/results/noise.json --only 2 % slower",
            "--fit docs/results/noise.json --only 2 % slower",
        ),
        ("--only a.http@/opt/my-py/bin/python,b --keep=/srv/run", "--only a.http@python,b --keep=run"),
        (f"--keep {REPOSITORY}/bench/out/run", "--keep bench/out/run"),
        ("--url http://127.0.0.1:8000/v1", "--url http://127.0.0.1:8000/v1"),
    ],
)
def test_a_command_has_no_places_of_one_machine(words: str, shown: str) -> None:
    assert command_of(words.split(" ")) == shown
