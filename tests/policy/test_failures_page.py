"""The worked examples of docs/failures.md, run as they stand there."""

import doctest
from pathlib import Path


def test_the_examples_do_what_the_page_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "failures.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted > 20
    assert not failed
