"""Prompts for a load run: made from a seed, or read from a file.

Made prompts are sentences of common words. Each starts with its own number, so no two share a prefix and
a prefix cache cannot help, unless `shared_tokens` asks for a common beginning. The server's tokenizer is not
known here: lengths are set in words, and one probe request tells how many tokens a word takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock import rng
from penstock.errors import ConfigError

DATASET_BYTES_MAX = 1024 * 1024 * 1024
DATASET_ROWS_MAX = 1_000_000
_TEXT = """
the a one each some water river stone light house garden letter number table window morning evening
question answer story music paper people city road market teacher student friend mother father
walks opens closes reads writes finds keeps sends turns holds asks tells makes takes gives shows
small large early late warm cold quick slow clear quiet green white simple careful often never
always today yesterday under over near behind between before after because and or but then when
where how why with without from into about
"""
WORDS = tuple(_TEXT.split())


class DatasetRow(msgspec.Struct, frozen=True):
    """A line of a data set: `messages` (chat) or `prompt`, and how many tokens to ask for."""

    prompt: str | None = None
    messages: tuple[dict[str, object], ...] | None = None
    max_tokens: int | None = None


_decode_row = msgspec.json.Decoder(DatasetRow).decode


@dataclass(slots=True, frozen=True)
class Prompt:
    """The content of one request. `max_tokens` is None where the run's own setting counts."""

    messages: tuple[dict[str, object], ...]
    max_tokens: int | None = None


def _user(text: str) -> tuple[dict[str, object], ...]:
    return ({"role": "user", "content": text},)


def sentence(seed: int, name: str, num_words: int) -> str:
    """`num_words` common words, the same for the same seed and name."""
    chance = rng.stream(seed, name)
    return " ".join(chance.choices(WORDS, k=num_words))


def probe(seed: int, run: str, num_words: int) -> Prompt:
    """A prompt whose token count calibrates `made`; it looks like the prompts that it stands for."""
    return Prompt(_user(_numbered(seed, run, 0, num_words)))


def _numbered(seed: int, run: str, number: int, num_words: int) -> str:
    return f"{number} {run} " + sentence(seed, f"{run}/{number}", max(1, num_words - 2))


@dataclass(slots=True, frozen=True, kw_only=True)
class PromptPlan:
    """The shape of made prompts, in tokens."""

    seed: int
    run: str
    """Told apart from earlier runs, whose prompts may still sit in the server's cache."""
    prompt_tokens: int
    shared_tokens: int
    tokens_per_word: float
    overhead_tokens: float
    """The tokens that the chat template adds."""


def made(plan: PromptPlan) -> Iterator[Prompt]:
    """An endless supply of prompts of about `prompt_tokens` tokens each."""
    total = max(1, round((plan.prompt_tokens - plan.overhead_tokens) / plan.tokens_per_word))
    num_shared = min(total - 1, round(plan.shared_tokens / plan.tokens_per_word))
    shared = sentence(plan.seed, "shared", num_shared) + " " if num_shared > 0 else ""
    number = 0
    while True:
        number += 1
        yield Prompt(_user(shared + _numbered(plan.seed, plan.run, number, total - max(0, num_shared))))


def read_dataset(path: Path) -> list[Prompt]:
    """Read a JSON-lines file whose rows are `DatasetRow`s.

    Raises:
        ConfigError: the file cannot be read, is too large, or a line is not such a row (with its number).
    """
    prompts: list[Prompt] = []
    try:
        if path.stat().st_size > DATASET_BYTES_MAX:
            raise ConfigError(f"--dataset {path}: over {DATASET_BYTES_MAX} bytes")
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if len(prompts) == DATASET_ROWS_MAX:
                    raise ConfigError(f"--dataset {path}: over {DATASET_ROWS_MAX} rows")
                if line.strip():
                    prompts.append(_prompt(line, f"--dataset {path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror or error}") from error
    if not prompts:
        raise ConfigError(f"--dataset {path}: it has no rows")
    return prompts


def _prompt(line: bytes, where: str) -> Prompt:
    try:
        row = _decode_row(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if (row.prompt is None) == (row.messages is None):
        raise ConfigError(f'{where}: give either "prompt" or "messages"')
    if row.max_tokens is not None and row.max_tokens < 1:
        raise ConfigError(f'{where}: "max_tokens" must be at least 1')
    return Prompt(row.messages or _user(row.prompt or ""), row.max_tokens)
