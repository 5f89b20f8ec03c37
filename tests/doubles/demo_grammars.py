"""The small demo model's vocabulary, as grammars see it; read once for all tests of a process."""

from functools import cache
from pathlib import Path

from penstock.engine.grammar.compiler import GrammarTokens

MODEL = Path(__file__).parents[2] / "models" / "penstock-demo-mini"


@cache
def tokens() -> GrammarTokens:
    found = GrammarTokens.load(MODEL, 4096)
    assert found is not None
    return found
