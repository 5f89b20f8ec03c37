"""A vocabulary for grammars, read by a thread while the model's weights are.

Reading it is half a second of work that never leaves the interpreter to others, and packing weights is one
long call that does not need the interpreter.
"""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import OperatorError
from penstock.models.files import has_file
from penstock.models.registry import read_spec

if TYPE_CHECKING:
    from penstock.engine.grammar.compiler import GrammarTokens


class Vocabulary:
    """Of the model in `model_dir`, whose logits have `vocab_size` entries."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._tokens: Future[GrammarTokens | None] = Future()
        threading.Thread(target=self._read, name="worker-vocabulary", daemon=True).start()

    def tokens(self) -> "GrammarTokens | None":
        """Wait for it; None: grammars are not possible with it, which is logged.

        Raises:
            ImportError: llguidance is not installed.
        """
        return self._tokens.result()

    def _read(self) -> None:
        try:
            # The library may not be installed.
            from penstock.engine.grammar.compiler import GrammarTokens

            self._tokens.set_result(GrammarTokens.load(self._model_dir, self._vocab_size))
        except BaseException as error:  # noqa: BLE001  (it is raised in the thread that asks)
            self._tokens.set_exception(error)


def begin_vocabulary(model_dir: Path) -> Vocabulary | None:
    """Begin to read it; None: the model has no use for one, or its loading will say why not."""
    try:
        spec, _ = read_spec(model_dir)
    except OperatorError:
        return None
    if spec.embeds or not has_file(model_dir / "tokenizer.json"):
        return None
    return Vocabulary(model_dir, spec.vocab_size)
