"""Which models give vectors instead of text, and how one is made of a text's hidden states.

Two layouts say so. A sentence-transformers directory lists its parts in `modules.json`, with the pooling in
a directory of its own (`1_Pooling/config.json`). A plain Hugging Face directory says it by its architecture:
one without a head (`Qwen3Model`, `BertModel`) has nothing but hidden states to give.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_BYTES_MAX, HfConfig

PoolingKind = Literal["last", "mean", "cls"]
MODULES_FILE = "modules.json"
_TOKENS_FILE = "sentence_bert_config.json"
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_MODULES_MAX = 16
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolingSpec:
    """How the vector of a text comes about."""

    kind: PoolingKind
    """The last token's hidden state, the mean of all, or the first's."""
    normalise: bool = True
    """Its length becomes 1."""
    tokens_max: int = 0
    """Tokens of a text at most, where that is less than the model was made for; 0: it is not."""
    dimensions: tuple[int, ...] | None = None
    """It was trained so that the first dimensions alone are a vector too (Matryoshka, Kusupati et al. 2022,
    arXiv 2205.13147): how many of them, or any number (empty). None: it was not."""


class _Module(msgspec.Struct):
    """One entry of modules.json."""

    path: str = ""
    type: str = ""

    @property
    def kind(self) -> str:
        """The class, without where it is from."""
        return self.type.rpartition(".")[2]


class _PoolingFile(msgspec.Struct):
    """The fields of a pooling module's config.json that are read; newer files have one word, older ones a
    flag each.
    """

    pooling_mode: str | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _TokensFile(msgspec.Struct):
    """The fields of sentence_bert_config.json that are read."""

    max_seq_length: int | None = None


def read_pooling(directory: Path, config: HfConfig, *, bare: PoolingKind | None) -> PoolingSpec | None:
    """How the model in `directory` makes vectors; None: it generates text.

    Args:
        directory: of the model.
        config: its config.json.
        bare: the pooling of its architecture where no file says it; None: an architecture with a head.

    Raises:
        CheckpointError: it makes them in a way that is not supported here; the message names the file.
    """
    path = directory / MODULES_FILE
    if not directory.is_dir() or not path.is_file():
        return None if bare is None else PoolingSpec(kind=bare, dimensions=_dimensions(config))
    modules = _read(path, list[_Module])
    if len(modules) > _MODULES_MAX:
        raise CheckpointError(f"{path}: names {len(modules)} modules; expected at most {_MODULES_MAX}")
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        unknown = next((kind for kind in kinds if kind not in _MODULES), None)
        what = ", ".join(kinds) if unknown is None else f"a module {unknown[:64]!r}"
        raise CheckpointError(
            f"{path}: has {what}, which is not supported; expected Transformer, Pooling and maybe Normalize"
        )
    if modules[0].path not in ("", "."):
        raise CheckpointError(
            f"{path}: its Transformer lies in {modules[0].path[:64]!r}; expected it in the directory itself"
        )
    return PoolingSpec(
        kind=_kind(directory, modules[1].path),
        normalise=len(modules) == 3,
        tokens_max=_tokens_max(directory),
        dimensions=_dimensions(config),
    )


def _kind(directory: Path, name: str) -> PoolingKind:
    if not name or Path(name).name != name:
        raise CheckpointError(f"{directory / MODULES_FILE}: the pooling lies in {name[:64]!r}, outside of it")
    path = directory / name / "config.json"
    file = _read(path, _PoolingFile)
    if file.pooling_mode is not None:
        kind = _KINDS.get(file.pooling_mode)
        asked = [file.pooling_mode]
    else:
        flags = [field for field in _PoolingFile.__struct_fields__[1:] if getattr(file, field)]
        kind, asked = (_FLAGS.get(flags[0]) if len(flags) == 1 else None), flags
    if kind is None:
        raise CheckpointError(
            f"{path}: pools by {' and '.join(asked)[:128] or 'nothing'}, which is not supported; expected "
            f"one of {', '.join(_KINDS)}"
        )
    return kind


def _tokens_max(directory: Path) -> int:
    path = directory / _TOKENS_FILE
    if not path.is_file():
        return 0
    found = _read(path, _TokensFile).max_seq_length or 0
    if found < 0:
        raise CheckpointError(f"{path}: max_seq_length is {found}, expected a number above zero")
    return found


def _dimensions(config: HfConfig) -> tuple[int, ...] | None:
    """As vLLM reads it: `matryoshka_dimensions`, or `is_matryoshka` for any number."""
    if config.matryoshka_dimensions:
        return tuple(config.matryoshka_dimensions)
    return () if config.is_matryoshka else None


def _read(path: Path, kind: Any) -> Any:  # noqa: ANN401
    try:
        if (size := path.stat().st_size) > CONFIG_BYTES_MAX:
            raise CheckpointError(f"{path}: {size} bytes is over the bound of {CONFIG_BYTES_MAX}")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: nests too deeply") from None
