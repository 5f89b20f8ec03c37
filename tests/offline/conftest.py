from collections.abc import Iterator
from pathlib import Path

import pytest
from small_llm import MINI, SMALL

from penstock import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """One engine for all tests that leave it as it is."""
    with LLM(str(MINI), served_model_name="mini", **SMALL) as llm:
        yield llm


@pytest.fixture(scope="session")
def mini() -> Path:
    return MINI
