"""The text of Python's own standard library, the only training text that the task scripts do not write."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from random import Random

SKIPPED = ("test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__", "encodings", "pydoc_data")
CHUNK_CHARACTERS = 600


def stdlib_files() -> list[Path]:
    """The `.py` files of the running Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not set(SKIPPED) & set(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def stdlib_chunks(seed: int, size: int = CHUNK_CHARACTERS) -> list[str]:
    """Every file cut at line ends into chunks of about `size` characters, shuffled by `seed`."""
    chunks: list[str] = []
    for path in stdlib_files():
        held = ""
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True):
            held += line
            if len(held) >= size:
                chunks.append(held)
                held = ""
        if len(held) > 200:
            chunks.append(held)
    Random(f"{seed}:stdlib").shuffle(chunks)
    return chunks
