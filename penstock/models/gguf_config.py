"""GGUF models, one file or several that one was split into; and from their keys to what `config.json` would
say, and llama.cpp's names of tensors. The headers are `gguf_header.py`'s.

llama.cpp's converter leaves out what its own code knows by the architecture (Gemma's factor of scores, that
experts' shares are normalised) and writes some settings as tensors (the factors of a stretched rotation).
"""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.config import FULL, SIZES_MAX, HfConfig, RopeParameters, check_sizes
from penstock.models.gguf_header import MAGIC, GgufFile, GgufTensor, HeaderReader, meant
from penstock.models.names import CheckpointNames
from penstock.models.quantization import Quantization

SUFFIX = ".gguf"
SPLITS_MAX = 4096
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class Gguf:
    """A model of one file, or of several that it was split into."""

    first: GgufFile
    """The one with all keys."""
    files: tuple[GgufFile, ...]
    tensors: dict[str, GgufTensor]
    """Of all files."""

    @property
    def path(self) -> Path:
        """By which it is known."""
        return self.first.path


def starts_as_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> Gguf:
    """The headers of a model's file, and of those that were split from it. The last ones are remembered.

    Raises:
        CheckpointError: a file is missing, truncated, no GGUF file, or says what cannot be.
    """
    first = _read_file(path)
    count = first.integer("split.count", 1)
    assert count is not None
    if count <= 1:
        return Gguf(first, (first,), first.tensors)
    return _joined(first, count)


def split_names(name: str) -> list[str]:
    """The names of all files that belong to one; itself alone if it was not split."""
    found = _SPLIT_NAME.fullmatch(name)
    if found is None:
        return [name]
    stem, _, count = found.groups()
    return [
        f"{stem}-{i:05}-of-{count}{name[-len(SUFFIX) :]}" for i in range(1, min(int(count), SPLITS_MAX) + 1)
    ]


def read_floats(tensor: GgufTensor, count_max: int) -> tuple[float, ...]:
    """The numbers of a small tensor of float32.

    Raises:
        CheckpointError: it is larger, or of another type.
    """
    count = prod(tensor.shape)
    if tensor.type.name != "F32" or count > count_max:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} is {list(tensor.shape)} {tensor.type.name}; expected at "
            f"most {count_max} numbers of F32"
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return tuple(map(meant, struct.unpack(f"<{count}f", file.read(4 * count))))


def _joined(first: GgufFile, count: int) -> Gguf:
    names = split_names(first.path.name)
    number = first.integer("split.no", 0)
    if count > SPLITS_MAX or len(names) != count:
        raise CheckpointError(
            f"{first.path}: is one of {count} files (split.count); expected a name that ends in "
            f"-00001-of-{min(count, 99_999):05}.gguf"
        )
    if number != 0 or names[0] != first.path.name:
        raise CheckpointError(f"{first.path}: is not the first of its {count} files; give {names[0]}")
    files = [first]
    for i, name in enumerate(names[1:], 1):
        part = _read_file(first.path.with_name(name))
        if part.integer("split.no") != i or part.integer("split.count") != count:
            raise CheckpointError(
                f"{part.path}: split.no and split.count are {part.integer('split.no')} and "
                f"{part.integer('split.count')}; expected {i} and {count}"
            )
        files.append(part)
    tensors: dict[str, GgufTensor] = {}
    for part in files:
        if double := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path}: tensor {min(double)} is in an earlier file too")
        tensors |= part.tensors
    total = first.integer("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{first.path}: the {count} files hold {len(tensors)} tensors; expected {total} "
            f"(split.tensors.count)"
        )
    return Gguf(first, tuple(files), tensors)


def _read_file(path: Path) -> GgufFile:
    try:
        found = path.stat()
        return _remembered(path, found.st_size, found.st_mtime_ns, found.st_ino)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


@lru_cache(maxsize=2)
def _remembered(path: Path, num_bytes: int, _mtime_ns: int, _inode: int) -> GgufFile:
    """Tokenizer, template and configuration are read one after the other: the header is not, each time."""
    if num_bytes < 24:
        raise CheckpointError(f"{path}: {num_bytes} bytes are no GGUF file (truncated?)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return HeaderReader(path, data).read()
        except struct.error as error:
            raise CheckpointError(f"{path}: ends within its header (truncated?)") from error


def experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices of a tensor of experts, `[experts, n, k]`, each by its number within the name."""
    count, *shape = tensor.shape
    base, _, suffix = tensor.name.rpartition(".")
    size = tensor.num_bytes // count
    for e in range(count):
        yield GgufTensor(
            tensor.path, f"{base}.{e}.{suffix}", tuple(shape), tensor.type, tensor.start + e * size
        )


ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""llama.cpp's names and ours. Mistral and Mixtral are `llama` there; `mistral3` is Mistral 3's text part."""
REORDERED = ("llama", "mistral3")
"""Those that rotate neighbouring rows of queries and keys, whose rows are stored in that order."""
_MIXTRAL = "MixtralForCausalLM"
_PAIRS_MAX = 4096
_WHOLE_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B models, whose scores have another factor: no key says so, llama.cpp counts layers."""
_GEMMA3_LOCAL_THETA = 10_000.0

_NAMES = CheckpointNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{i}.",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    expert_gate="ffn_gate_exps.{e}",
    expert_up="ffn_up_exps.{e}",
    expert_down="ffn_down_exps.{e}",
    input_norm="attn_norm",
    post_attention_norm="ffn_norm",
    attention_out_norm="post_attention_norm",
    mlp_out_norm="post_ffw_norm",
    ignored_suffixes=(
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
        "attn_rot_embd.weight",
    ),
)


def gguf_architecture(gguf: Gguf) -> str:
    """llama.cpp's name of the architecture.

    Raises:
        CheckpointError: it is none that we have a family for.
    """
    found = gguf.first.text("general.architecture", "none")
    kind = gguf.first.text("general.type", "model")
    if found == "clip" or kind not in ("model", None):
        raise CheckpointError(
            f"{gguf.path}: is a {found} of type {kind}, a part beside a model; give the model's own file"
        )
    if found not in ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path}: general.architecture {found!r} is not supported; expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def gguf_names(gguf: Gguf) -> CheckpointNames:
    """The names of the tensors."""
    names = _NAMES
    if "blk.0.attn_qkv.weight" in gguf.tensors:
        names = replace(names, qkv="attn_qkv")
    if gguf_architecture(gguf) == "phi3":
        names = replace(names, gate_up="ffn_up")
    if "blk.0.ffn_gate.0.weight" in gguf.tensors:  # Mixtral, as it was written until April 2024.
        names = replace(names, expert_gate="ffn_gate.{e}", expert_up="ffn_up.{e}", expert_down="ffn_down.{e}")
    return names


def gguf_config(gguf: Gguf) -> HfConfig:
    """The content that `config.json` would have.

    Raises:
        CheckpointError: a key is missing, or is not what it must be, by its name.
    """
    return _Keys(gguf).config()


def gguf_has_biases(gguf: Gguf) -> tuple[bool, bool, bool]:
    """Whether the first layer adds any to q, k and v; to attention's output; in the feed-forward layer."""
    q, o, up = (f"blk.0.{part}.bias" in gguf.tensors for part in ("attn_q", "attn_output", "ffn_up"))
    return q, o, up


_BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8,
}  # fmt: skip
"""Widths of the values; what they are scaled by comes on top."""


def gguf_quantization(gguf: Gguf) -> Quantization | None:
    """The type that most numbers of the layers have; None: they are dense."""
    sizes = dict[str, int]()
    for name, tensor in gguf.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) > 1:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + prod(tensor.shape)
    kind = max(sizes, key=lambda name: (sizes[name], name), default="F32")
    return Quantization(method="gguf", bits=_BITS[kind], layout=kind) if kind in _BITS else None


class _Keys:
    """Reads one file's keys."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf, self._file = gguf, gguf.first
        self._prefix = gguf_architecture(gguf)

    def config(self) -> HfConfig:
        arch = self._prefix
        hidden, num_heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._optional("attention.key_length") or hidden // num_heads
        if self._optional("attention.value_length") not in (None, head_dim):
            raise self._error("attention.value_length", f"the {head_dim} of attention.key_length")
        if self._number("attention.temperature_scale", 0.0):
            raise self._error("attention.temperature_scale", "none")
        experts = self._optional("expert_count") or 0
        architecture = _MIXTRAL if arch == "llama" and experts else ARCHITECTURES[arch]
        window = self._optional("attention.sliding_window") or None
        layers = self._size("block_count")
        check_sizes(HfConfig(num_hidden_layers=layers), str(self._file.path))
        config = HfConfig(
            architectures=[architecture],
            model_type=arch,
            vocab_size=self._vocab_size(hidden),
            hidden_size=hidden,
            intermediate_size=self._size("feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=num_heads,
            num_key_value_heads=self._optional("attention.head_count_kv") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=self._size("context_length"),
            rms_norm_eps=self._above_zero("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in self._gguf.tensors,
            sliding_window=window if arch in ("gemma2", "gemma3", "phi3") else None,
            layer_types=[FULL] * layers if arch == "gemma3" and window is None else None,
            **self._experts(experts),
            **self._gemma(hidden, num_heads, head_dim),
            **self._rotation(head_dim),
        )
        check_sizes(config, str(self._file.path))
        return config

    def _experts(self, count: int) -> dict[str, Any]:
        if not count:
            return {}
        if self._prefix not in ("llama", "qwen3moe"):
            raise self._error("expert_count", "none for this architecture")
        inner = self._optional("expert_feed_forward_length")
        return {
            "num_experts": count,
            "num_experts_per_tok": self._size("expert_used_count"),
            "moe_intermediate_size": inner or self._size("feed_forward_length"),
            # llama.cpp normalises them without asking.
            "norm_topk_prob": True,
        }

    def _gemma(self, hidden: int, num_heads: int, head_dim: int) -> dict[str, Any]:
        if not self._prefix.startswith("gemma"):
            return {}
        is_27b = self._size("block_count") == _WHOLE_SCALE_LAYERS[self._prefix]
        found: dict[str, Any] = {"query_pre_attn_scalar": hidden // num_heads if is_27b else head_dim}
        for key, field in (
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ):
            cap = self._file.number(f"{self._prefix}.{key}")
            if cap is not None:
                found[field] = cap
        return found

    def _rotation(self, head_dim: int) -> dict[str, Any]:
        turning = self._optional("rope.dimension_count") or head_dim
        if turning != head_dim and self._prefix != "phi3":
            raise self._error("rope.dimension_count", f"the head size {head_dim}")
        if turning > head_dim or turning % 2:
            raise self._error("rope.dimension_count", f"an even number up to {head_dim}")
        given: dict[str, Any] = {"rope_theta": self._number("rope.freq_base", 10_000.0)}
        if turning != head_dim:
            given["partial_rotary_factor"] = turning / head_dim
        given |= self._stretch(turning // 2)
        if self._prefix != "gemma3":
            return {"rope_parameters": RopeParameters(**given)}
        local = self._number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        return {
            "rope_parameters": RopeParameters(
                full_attention=RopeParameters(**given), sliding_attention=RopeParameters(rope_theta=local)
            )
        }

    def _stretch(self, pairs: int) -> dict[str, Any]:
        """How the context was stretched: by a key's rule, or by factors in tensors, one for each pair."""
        tensors = self._gguf.tensors
        original = self._optional("rope.scaling.original_context_length") or self._size("context_length")
        by_tensor = {"rope_type": "longrope", "original_max_position_embeddings": original}
        if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
            return by_tensor | {
                "short_factor": self._factors("rope_factors_short.weight", pairs),
                "long_factor": self._factors("rope_factors_long.weight", pairs),
                "attention_factor": self._number("rope.scaling.attn_factor", 1.0),
            }
        if "rope_freqs.weight" in tensors:  # Llama 3.1's rule, worked out: the same at any length.
            factors = self._factors("rope_freqs.weight", pairs)
            return by_tensor | {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        kind = self._file.text(f"{self._prefix}.rope.scaling.type", "none")
        if kind in ("none", "longrope"):
            return {}
        factor = self._above_zero("rope.scaling.factor")
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise self._error("rope.scaling.type", "none, linear, yarn or longrope")
        if self._number("rope.scaling.yarn_log_multiplier", 0.0):
            raise self._error("rope.scaling.yarn_log_multiplier", "none")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": self._number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._number("rope.scaling.yarn_beta_slow", 1.0),
        }

    def _factors(self, name: str, pairs: int) -> list[float]:
        tensor: GgufTensor | None = self._gguf.tensors.get(name)
        if tensor is None or tensor.shape != (pairs,):
            shape = None if tensor is None else list(tensor.shape)
            raise CheckpointError(
                f"{self._file.path}: tensor {name} has shape {shape}; expected {[pairs]}, a factor for each "
                f"pair of dimensions that turns"
            )
        found = read_floats(tensor, _PAIRS_MAX)
        if not all(0 < factor < float("inf") for factor in found):
            raise CheckpointError(f"{tensor.path}: tensor {name}: expected factors above zero")
        return list(found)

    def _vocab_size(self, hidden: int) -> int:
        """Rows of the embedding: `vocab_size` is not in every file, and the tokenizer may know fewer."""
        table = self._gguf.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2 or table.shape[1] != hidden:
            shape = None if table is None else list(table.shape)
            raise CheckpointError(
                f"{self._file.path}: tensor token_embd.weight has shape {shape}; expected [tokens, {hidden}]"
            )
        tokens = self._file.count("tokenizer.ggml.tokens") or 0
        if tokens > table.shape[0]:
            raise CheckpointError(
                f"{self._file.path}: tensor token_embd.weight has {table.shape[0]} rows for {tokens} tokens; "
                f"expected one for each"
            )
        return table.shape[0]

    def _optional(self, key: str) -> int | None:
        name = f"{self._prefix}.{key}"
        if (count := self._file.count(name)) is not None:  # Per layer: we have one number for all.
            numbers = (
                set(self._file.numbers(name) or ()) if count <= SIZES_MAX["num_hidden_layers"] else {0, 1}
            )
            if len(numbers) != 1:
                raise self._error(key, "the same number for all layers")
            return int(numbers.pop())
        found = self._file.integer(name)
        if found is not None and found < 0:
            raise self._error(key, "no negative number")
        return found

    def _size(self, key: str) -> int:
        found = self._optional(key)
        if not found:
            raise self._error(key, "a whole number above zero")
        return found

    def _number(self, key: str, default: float) -> float:
        found = self._file.number(f"{self._prefix}.{key}", default)
        assert found is not None
        return found

    def _above_zero(self, key: str) -> float:
        found = self._number(key, 0.0)
        if not 0 < found < float("inf"):
            raise self._error(key, "a number above zero")
        return found

    def _error(self, key: str, expected: str) -> CheckpointError:
        name = f"{self._prefix}.{key}"
        given = self._file.keys.get(name)
        said = "missing" if given is None else str(given)[:64]
        return CheckpointError(f"{self._file.path}: {name} is {said}; expected {expected}")
