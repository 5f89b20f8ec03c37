"""Encoders: BERT (Devlin et al. 2018, arXiv 1810.04805) and XLM-RoBERTa (Conneau et al. 2019, arXiv
1911.02116), as data: shapes, names of tensors, and what is made of a text's hidden states.

Every token sees all others, so a text is computed as a whole, and nothing of it is kept.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, positive
from penstock.models.files import is_gguf, read_config
from penstock.models.pooling import PoolingSpec, read_pooling

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
