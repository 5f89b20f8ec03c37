"""Models that give vectors instead of text: which they are, how a vector is made of a text's hidden states,
and encoders as data.

Two layouts say that a model is one. A sentence-transformers directory lists its parts in `modules.json`, with
the pooling in a directory of its own (`1_Pooling/config.json`). A plain Hugging Face directory says it by its
architecture: one without a head (`Qwen3Model`, `BertModel`) has nothing but hidden states to give.

Encoders are BERT (Devlin et al. 2018, arXiv 1810.04805) and XLM-RoBERTa (Conneau et al. 2019, arXiv
1911.02116): shapes and names of tensors. Every token sees all others, so a text is computed as a whole, and
nothing of it is kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_BYTES_MAX, CONFIG_FILE, HfConfig, positive
from penstock.models.files import is_gguf, read_config

PoolingKind = Literal["last", "mean", "cls"]
MODULES_FILE = "modules.json"
_TOKENS_FILE = "sentence_bert_config.json"
_POOLINGS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
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
        kind = _POOLINGS.get(file.pooling_mode)
        asked = [file.pooling_mode]
    else:
        flags = [field for field in _PoolingFile.__struct_fields__[1:] if getattr(file, field)]
        kind, asked = (_FLAGS.get(flags[0]) if len(flags) == 1 else None), flags
    if kind is None:
        raise CheckpointError(
            f"{path}: pools by {' and '.join(asked)[:128] or 'nothing'}, which is not supported; expected "
            f"one of {', '.join(_POOLINGS)}"
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


_BERT, _ROBERTA = "bert.", "roberta."
_KINDS = {
    "BertModel": (_BERT, False),
    "BertForSequenceClassification": (_BERT, True),
    "RobertaModel": (_ROBERTA, False),
    "RobertaForSequenceClassification": (_ROBERTA, True),
    "XLMRobertaModel": (_ROBERTA, False),
    "XLMRobertaForSequenceClassification": (_ROBERTA, True),
}
ENCODERS = tuple(_KINDS)
"""The architectures that are read."""
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(slots=True, frozen=True, kw_only=True)
class EncoderSpec:
    """The shape of an encoder: post-norm blocks of full attention and a feed-forward layer."""

    architecture: str
    prefix: str
    """Of tensors' names, where they have one."""
    scores: bool
    """It has a head with one number, the score of a pair of texts."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    """Rows of the table of positions."""
    num_types: int
    norm_eps: float
    activation: str
    padding_id: int | None = None
    """Positions are counted from behind this one, which tokens of that id have themselves (RoBERTa)."""
    applies_sigmoid: bool = True
    """Of a score."""

    @property
    def max_position(self) -> int:
        """Tokens of a text at most."""
        return self.num_positions - (0 if self.padding_id is None else self.padding_id + 1)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model."""
        return sum(_product(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor, by its name without the prefix."""
        hidden, inner = self.hidden_size, self.intermediate_size
        found: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (self.num_positions, hidden),
            "embeddings.token_type_embeddings.weight": (self.num_types, hidden),
        }
        found |= _pair("embeddings.LayerNorm", (hidden,), hidden)
        for i in range(self.num_layers):
            layer = f"encoder.layer.{i}."
            for name in ("query", "key", "value"):
                found |= _pair(f"{layer}attention.self.{name}", (hidden, hidden), hidden)
            found |= _pair(f"{layer}attention.output.dense", (hidden, hidden), hidden)
            found |= _pair(f"{layer}attention.output.LayerNorm", (hidden,), hidden)
            found |= _pair(f"{layer}intermediate.dense", (inner, hidden), inner)
            found |= _pair(f"{layer}output.dense", (hidden, inner), hidden)
            found |= _pair(f"{layer}output.LayerNorm", (hidden,), hidden)
        if self.scores:
            first, last = self.head
            found |= _pair(first, (hidden, hidden), hidden) | _pair(last, (1, hidden), 1)
        return found

    @property
    def head(self) -> tuple[str, str]:
        """Names of the two layers that make a score of the first token's hidden state."""
        if self.prefix == _BERT:
            return "pooler.dense", "classifier"
        return "classifier.dense", "classifier.out_proj"


def _pair(name: str, shape: tuple[int, ...], rows: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": (rows,)}


def _product(shape: tuple[int, ...]) -> int:
    assert all(size > 0 for size in shape), "a tensor has rows"
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def stored_encoder(directory: Path) -> tuple[EncoderSpec, PoolingSpec] | None:
    """The encoder in a model directory, and how it makes vectors; None: it holds something else.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if is_gguf(directory):
        return None
    config = read_config(directory)
    name = next((each for each in config.architectures or () if each in _KINDS), None)
    if name is None:
        return None
    spec = _spec(config, name)
    if spec.scores:
        return spec, PoolingSpec(kind="cls", normalise=False)
    pooling = read_pooling(directory, config, bare="cls")
    assert pooling is not None, "an encoder without a head makes vectors"
    if pooling.kind == "last":
        raise CheckpointError(f"{directory}: pools by the last token, which is not supported for {name}")
    return spec, pooling


def _spec(config: HfConfig, name: str) -> EncoderSpec:
    prefix, scores = _KINDS[name]
    activation, kind = config.hidden_act or "gelu", config.position_embedding_type or "absolute"
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{CONFIG_FILE}: hidden_act {activation!r} is not supported; expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if kind != "absolute" or config.is_decoder:
        what = "is_decoder is true" if config.is_decoder else f"position_embedding_type is {kind!r}"
        raise CheckpointError(f"{CONFIG_FILE}: {what}, which is not supported for {name}")
    num_labels = len(config.id2label) if config.id2label else config.num_labels or 2
    if scores and num_labels != 1:
        raise CheckpointError(f"{CONFIG_FILE}: {name} has {num_labels} labels; expected one, a score")
    heads, hidden = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    if hidden % heads:
        raise CheckpointError(
            f"{CONFIG_FILE}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    spec = EncoderSpec(
        architecture=name,
        prefix=prefix,
        scores=scores,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_positions=positive(config, "max_position_embeddings"),
        num_types=positive(config, "type_vocab_size"),
        norm_eps=config.layer_norm_eps or 1e-12,
        activation=activation,
        padding_id=(config.pad_token_id if config.pad_token_id is not None else 1)
        if prefix == _ROBERTA
        else None,
        applies_sigmoid=_sigmoid(config),
    )
    if spec.max_position < 2:
        raise CheckpointError(f"{CONFIG_FILE}: max_position_embeddings {spec.num_positions} leaves no text")
    return spec


def _sigmoid(config: HfConfig) -> bool:
    """Whether a score passes a sigmoid, as sentence-transformers' cross-encoders do unless they say."""
    inner = config.sentence_transformers or {}
    said = inner.get("activation_fn") or config.sbert_ce_default_activation_function or "Sigmoid"
    name = str(said).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{CONFIG_FILE}: an activation {name[:64]!r} of scores is not supported")
    return name == "Sigmoid"
