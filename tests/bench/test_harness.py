"""A bench's result file names its command without the places of one machine."""

import subprocess

import pytest

from bench.harness import REPOSITORY, command_of, commit


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


def test_a_trees_commit_is_its_own_and_not_that_of_a_repository_around_it(tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments],
            check=True, capture_output=True,
        )  # fmt: skip

    within = tmp_path / "within"
    within.mkdir()
    (within / "file").write_text("1")
    assert commit(tmp_path) == ""
    git("init")
    git("add", ".")
    git("commit", "-m", "One")
    head = commit(tmp_path)
    assert len(head) >= 7
    assert commit(within) == ""
    (within / "file").write_text("2")
    assert commit(tmp_path) == head + "+"
