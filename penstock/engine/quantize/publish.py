"""A checkpoint in, a quantized one out, in a layout that others load.

A few layers are calibrated at a time. Each layer is written when it is rounded, so that interrupted work is
taken up again behind it; those that were calibrated together become one file.

    gptq-int4   GPTQ, symmetric, in groups; `quant_method: gptq`
    awq-int4    scaled inputs, zero points, in groups; `quant_method: awq`, "gemm"
    int8        W8A8, one scale per output, inputs rounded as they come; compressed-tensors
    fp8         e4m3, one scale per output, inputs rounded as they come; compressed-tensors

Embedding, head, norms and routers stay as they are.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from penstock.engine.loader import INDEX_FILE, load_weights
from penstock.engine.quantize.calibrate import (
    Calibration,
    Inputs,
    Rounded,
    awq_clips,
    awq_scales,
    float8,
    gptq,
    int8,
    nearest,
    relative_error,
)
from penstock.errors import CheckpointError, ConfigError
from penstock.models.config import CONFIG_FILE
from penstock.models.names import TensorPart, decoder_weights
from penstock.models.registry import read_spec, stored_quantization

Target = Literal["gptq-int4", "awq-int4", "int8", "fp8"]
TARGETS: tuple[Target, ...] = get_args(Target)
GROUPS = (128, 64, 32)
GRAM_BYTES_MAX = 2 << 30
"""Of the Gram matrices that are held at once, which says how many layers are calibrated in one pass."""
REPORT_SEQUENCES = 8
STATE_FILE = "quantize.json"
"""In a directory that is not finished: what it is made with, and which parts are there."""
LINEARS = ("qkv", "o", "gate_up", "down")
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output each nibble of a word holds, from the low end."""
_OF_MODULES = "[0-9]_*/config.json"
"""Where sentence-transformers says how a vector is made of a text's states."""
_NOT_COPIED = ("*.safetensors", "*.index.json", "*.bin", "*.gguf", CONFIG_FILE)

Tensors = dict[str, Tensor]
OnProgress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(slots=True, frozen=True)
class LayerError:
    """How much of a layer's outputs was lost, on the calibration text."""

    name: str
    error: float
    """Root of the squared error over the squared outputs."""


class _State(msgspec.Struct):
    settings: dict[str, Any]
    errors: dict[str, float]
    parts: list[str]
    layers: list[int] = []
    """Those that are rounded and in no part yet, each in a file of its own."""


class Quantizer:
    """One checkpoint being rounded.

    Args:
        directory: of a model with dense weights.
        output: where the quantized one goes; what is there of the same work is not done again.
        target: the format.
        sequences: the calibration text as token ids, each at most `SEQUENCE_TOKENS`.

    Raises:
        CheckpointError: the model cannot be loaded, or is quantized already.
        ConfigError: the format does not fit the model, or the directory holds something else.
    """

    def __init__(
        self, directory: Path, output: Path, target: Target, sequences: Sequence[Sequence[int]]
    ) -> None:
        self._directory, self._output = directory, output
        self._target: Target = target
        if (stored := stored_quantization(directory)) is not None:
            raise CheckpointError(
                f"{directory}: is quantized already ({stored.name}): give the dense weights"
            )
        self._spec, self._names = read_spec(directory)
        if self._names.ignored_prefixes:
            raise ConfigError(
                f"{directory}: has parts beside its decoder ({', '.join(self._names.ignored_prefixes)}), "
                f"which this engine does not read and would lose"
            )
        if target == "awq-int4" and self._spec.moe is not None:
            raise ConfigError("awq-int4 needs a model without experts: take gptq-int4")
        self._weights = {weight.key: weight for weight in decoder_weights(self._spec, self._names)}
        self._group = self._common_group() if target.endswith("int4") else 0
        settings = {
            "model": str(directory.resolve()),
            "to": target,
            "group": self._group,
            "tokens": sum(map(len, sequences)),
            "text": hash_of(sequences),
        }
        self._state = _read_state(output, settings)
        # Rounding to eight bits does not look at inputs: they are for the report alone.
        self._sequences = sequences if target.endswith("int4") else sequences[:REPORT_SEQUENCES]

    def run(self, on_progress: OnProgress) -> list[LayerError]:
        """Round what is left and write it; returns the errors of all layers, in their order."""
        passes = list(self._passes())
        done = len(self._state.parts)
        steps_per_pass = len(self._sequences) + max(map(len, passes))
        total = steps_per_pass * len(passes)
        left = [numbers for numbers in passes if _part_name(numbers) not in self._state.parts]
        calibration = Calibration(self._directory, self._sequences) if left else None
        at = done * steps_per_pass
        for numbers in left:
            assert calibration is not None
            layers = [i for i in numbers if i not in self._state.layers]
            seen = at + len(numbers) - len(layers)

            def step() -> None:
                nonlocal seen
                seen += 1
                on_progress(min(seen, total), total)

            if layers:
                inputs = calibration.listen([f"{i}.{key}" for i in layers for key in LINEARS], step)
                self._round(layers, inputs, step)
            self._join(numbers)
            at += steps_per_pass
        with _writing(self._output):
            self._finish()
        on_progress(total, total)
        return [LayerError(name, error) for name, error in self._state.errors.items()]

    def _common_group(self) -> int:
        """The largest group that divides the inputs of every layer."""
        widths = {
            part.shape[1]
            for key, weight in self._weights.items()
            if key.partition(".")[2] in LINEARS
            for part in weight.parts
        }
        for group in GROUPS:
            if all(width % group == 0 for width in widths):
                return group
        raise ConfigError(
            f"{self._target} rounds in groups of 32, 64 or 128 inputs, which do not divide this model's "
            f"layers of {', '.join(map(str, sorted(widths)))} inputs: take int8 or fp8"
        )

    def _passes(self) -> Iterator[range]:
        """Layers that are calibrated together."""
        widths = [self._spec.hidden_size, self._spec.q_size, self._spec.hidden_size]
        widths += [self._spec.intermediate_size] * (self._spec.moe.num_experts if self._spec.moe else 1)
        if self._spec.moe:
            widths += [self._spec.hidden_size] * (self._spec.moe.num_experts - 1)
        per_layer = sum(4 * width * width for width in widths)
        count = max(1, GRAM_BYTES_MAX // per_layer)
        for first in range(0, self._spec.num_layers, count):
            yield range(first, min(first + count, self._spec.num_layers))

    def _round(self, layers: Sequence[int], inputs: dict[str, Inputs], step: Callable[[], None]) -> None:
        """Round these layers and write each."""
        for i in layers:
            layer = _Layer(self, i, inputs)
            if self._target == "awq-int4":
                layer.scale_inputs(self._group)
            stored: Tensors = {}
            errors: dict[str, float] = {}
            for name, tensors, error in layer.rounded():
                stored |= tensors
                errors[name] = error
            self._write(_layer_name(i), stored | layer.others)
            self._state.layers.append(i)
            self._state.errors |= errors
            self._write_state()
            step()

    def _join(self, numbers: range) -> None:
        """Make one part of the layers that were calibrated together."""
        stored = self._outside() if numbers.start == 0 else {}
        for i in numbers:
            stored |= load_file(self._output / _layer_name(i))
        self._write(_part_name(numbers), stored)
        self._state.parts.append(_part_name(numbers))
        self._state.layers.clear()
        self._write_state()
        for i in numbers:
            (self._output / _layer_name(i)).unlink(missing_ok=True)

    def _write(self, name: str, tensors: Tensors) -> None:
        # Older readers refuse files that do not say which library wrote them.
        whole = {key: value.contiguous() for key, value in tensors.items()}
        with _writing(self._output):
            save_file(whole, self._output / name, metadata={"format": "pt"})
            (self._output / name).chmod(0o644)  # The library makes it its owner's alone.

    def take(self, keys: Sequence[str]) -> dict[str, tuple[Tensor, ...]]:
        """Parts of weights as they lie in the checkpoint."""
        source = load_weights(
            self._directory, self._spec, self._names, self._dtype(), lambda _done, _total: None
        )
        found = {key: source.take_parts(key) for key in keys}
        return {key: cast(tuple[Tensor, ...], parts) for key, parts in found.items()}

    def parts(self, key: str) -> tuple[TensorPart, ...]:
        """Names and shapes of a weight's tensors."""
        return self._weights[key].parts

    def keys_of(self, layer: int) -> list[str]:
        """All weights of a layer."""
        return [key for key in self._weights if key.partition(".")[0] == str(layer)]

    def store(self, base: str, weight: Tensor, inputs: Inputs) -> tuple[Tensors, Tensor]:
        """One layer's tensors as the format has them, and what its weight is now."""
        if self._target == "int8":
            values, scale = int8(weight)
            return {f"{base}.weight": values, f"{base}.weight_scale": scale}, values.float() * scale
        if self._target == "fp8":
            values, scale = float8(weight)
            return {f"{base}.weight": values, f"{base}.weight_scale": scale}, values.float() * scale
        if self._target == "gptq-int4":
            rounded = gptq(weight, inputs.gram, self._group)
        else:
            rounded = nearest(weight, self._group, awq_clips(weight, inputs.gram, self._group))
        return store_rounded(base, rounded, self._target, self._group), rounded.dense()

    @property
    def norm_offset(self) -> float:
        """Added to the weights of norms."""
        return self._spec.norm_offset

    def _dtype(self) -> torch.dtype:
        config = self._config()
        named = config.get("dtype") or config.get("torch_dtype")
        return torch.float32 if named == "float32" else torch.bfloat16

    def _config(self) -> dict[str, Any]:
        return json.loads((self._directory / CONFIG_FILE).read_bytes())

    def _outside(self) -> Tensors:
        """The tensors that belong to no layer."""
        keys = [key for key in self._weights if not key[0].isdigit()]
        return {
            part.name: tensor
            for key, tensors in self.take(keys).items()
            for part, tensor in zip(self.parts(key), tensors, strict=True)
        }

    def _write_state(self) -> None:
        temporary = self._output / f".{STATE_FILE}"
        with _writing(self._output):
            temporary.write_bytes(msgspec.json.encode(self._state))
            temporary.replace(self._output / STATE_FILE)

    def _finish(self) -> None:
        """The files beside the weights; `config.json` comes last, since it makes the directory a model."""
        for path in self._output.glob("layer-*.safetensors"):  # Work was interrupted after they were joined.
            path.unlink()
        for path in self._directory.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in (*_NOT_COPIED, "README.md")):
                shutil.copyfile(path, self._output / path.name)
        for path in self._directory.glob(_OF_MODULES):
            (self._output / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, self._output / path.parent.name / path.name)
        weight_map: dict[str, str] = {}
        size = 0
        for name in self._state.parts:
            with cast(Any, safe_open)(str(self._output / name), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (not a dict)
                    weight_map[key] = name
            size += (self._output / name).stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (self._output / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        config = self._config() | {"quantization_config": config_of(self._target, self._group)}
        (self._output / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        (self._output / STATE_FILE).unlink(missing_ok=True)


class _Layer:
    """One block of the decoder while it is rounded, in float32."""

    def __init__(self, quantizer: Quantizer, number: int, inputs: dict[str, Inputs]) -> None:
        self._quantizer, self._number, self._inputs = quantizer, number, inputs
        keys = quantizer.keys_of(number)
        found = quantizer.take(keys)
        # Copies: what is taken may lie in the mapped file.
        self._linears = {
            key: [part.to(torch.float32, copy=True) for part in found[f"{number}.{key}"]] for key in LINEARS
        }
        self.others: Tensors = {
            part.name: tensor
            for key in keys
            if key.partition(".")[2] not in LINEARS
            for part, tensor in zip(quantizer.parts(key), found[key], strict=True)
        }
        """Norms, biases and routers."""

    def scale_inputs(self, group: int) -> None:
        """AWQ: columns of a layer times a factor, and what computes its inputs by the factor."""
        number = self._number
        for key, norm in (("qkv", "input_norm"), ("gate_up", "post_attention_norm")):
            factor = self._scaled(key, group)
            (part,) = self._quantizer.parts(f"{number}.{norm}")
            offset, dtype = self._quantizer.norm_offset, self.others[part.name].dtype
            self.others[part.name] = ((self.others[part.name].float() + offset) / factor - offset).to(dtype)
        factor = self._scaled("down", group)
        gate_up = self._linears["gate_up"]  # Gate first, perhaps in one tensor.
        gate_up[-1][-len(factor) :] /= factor[:, None]
        bias = f"{number}.gate_up_bias"
        if bias in self._quantizer.keys_of(number):
            part = self._quantizer.parts(bias)[-1]
            scaled = self.others[part.name].to(torch.float32, copy=True)
            scaled[-len(factor) :] /= factor
            self.others[part.name] = scaled.to(self.others[part.name].dtype)

    def _scaled(self, key: str, group: int) -> Tensor:
        inputs = self._inputs[f"{self._number}.{key}"]
        parts = self._linears[key]
        magnitude = inputs.magnitude / max(inputs.count, 1)
        factor = awq_scales(torch.cat(parts), inputs.gram, magnitude, group)
        for part in parts:
            part *= factor
        # From now on the layer's inputs are smaller by as much.
        inputs.gram = inputs.gram / (factor[:, None] * factor)
        return factor

    def rounded(self) -> Iterator[tuple[str, Tensors, float]]:
        """Name, tensors and error of every linear layer."""
        for key, weights in self._linears.items():
            parts = self._quantizer.parts(f"{self._number}.{key}")
            for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                base = part.name.removesuffix(".weight")
                inputs = self._inputs_of(key, index, len(parts), weight.shape[1])
                tensors, dense = self._quantizer.store(base, weight, inputs)
                yield base, tensors, relative_error(weight, dense, inputs.gram)

    def _inputs_of(self, key: str, index: int, count: int, width: int) -> Inputs:
        """Of a part; an expert that no token of the text chose counts all inputs alike."""
        name = f"{self._number}.{key}"
        if key in ("gate_up", "down"):
            experts = [each for each in self._inputs if each.startswith(f"{name}#")]
            if experts or name not in self._inputs:
                name = f"{name}#{index // 2 if key == 'gate_up' else index}"
        found = self._inputs.get(name)
        return found or Inputs(torch.eye(width), torch.ones(width), 1)


def hash_of(sequences: Sequence[Sequence[int]]) -> str:
    """Of the calibration text: another one is other work."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(repr(list(sequence)).encode())
    return digest.hexdigest()[:16]


def _part_name(numbers: range) -> str:
    return f"model-layers-{numbers.start:04}-{numbers.stop - 1:04}.safetensors"


def _layer_name(number: int) -> str:
    return f"layer-{number:04}.safetensors"


def _read_state(output: Path, settings: dict[str, Any]) -> _State:
    """The part of this work that was done before.

    Raises:
        ConfigError: the directory holds something else.
    """
    path = output / STATE_FILE
    if path.is_file():
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: cannot be read: {error}; delete {output} to begin again") from error
        if state.settings != settings:
            raise ConfigError(
                f"{output}: holds work that was begun with another model, format or text; delete it, or give "
                f"another --output"
            )
        state.parts = [name for name in state.parts if _is_whole(output / name)]
        state.layers = [i for i in state.layers if _is_whole(output / _layer_name(i))]
        return state
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output}: is a file; give --output another name")
    with _writing(output):
        if output.exists() and any(output.iterdir()):
            raise ConfigError(f"{output}: is not empty; give another --output")
        output.mkdir(parents=True, exist_ok=True)
        state = _State(settings, {}, [])
        path.write_bytes(msgspec.json.encode(state))
    return state


def _is_whole(path: Path) -> bool:
    """Whether the file can be read: the machine may have stopped before it was on the disk."""
    with suppress(OSError, SafetensorError), cast(Any, safe_open)(str(path), framework="pt"):
        return True
    return False


@contextmanager
def _writing(output: Path) -> Generator[None]:
    """Trouble with the disk as an error that names the place; finished parts are taken up again.

    Raises:
        ConfigError: there is no place, or no permission.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        place = (isinstance(error, OSError) and (error.filename2 or error.filename)) or output  # Of two, to.
        does = "written" if Path(place).is_relative_to(output) else "read"
        raise ConfigError(
            f"{place}: cannot be {does}: {why}; the same command continues behind the parts that are there"
        ) from error


def config_of(target: Target, group: int) -> dict[str, Any]:
    """`quantization_config`."""
    if target == "gptq-int4":
        return {
            "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True,
            "lm_head": False, "checkpoint_format": "gptq",
        }  # fmt: skip
    if target == "awq-int4":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    kind = "int" if target == "int8" else "float"
    common = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "block_structure": None}
    weights = {**common, "strategy": "channel", "dynamic": False}
    inputs = {**common, "strategy": "token", "dynamic": True}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def _words(values: Tensor) -> Tensor:
    """Eight unsigned values of the last dimension to an int32, the first one lowest."""
    nibbles = values.to(torch.int64).reshape(*values.shape[:-1], -1, 8)
    words = torch.sum(nibbles << torch.arange(0, 32, 4), -1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def store_rounded(base: str, rounded: Rounded, target: Target, group: int) -> Tensors:
    """A four-bit layer's tensors as a format has them."""
    return _gptq_tensors(base, rounded, group) if target == "gptq-int4" else _awq_tensors(base, rounded)


def _gptq_tensors(base: str, rounded: Rounded, group: int) -> Tensors:
    k = rounded.values.shape[1]
    return {
        f"{base}.qweight": _words(rounded.values).t(),
        f"{base}.qzeros": _words((rounded.zeros - 1).t()),  # The format stores zero points less one.
        f"{base}.scales": rounded.scale.t().half(),
        f"{base}.g_idx": (torch.arange(k) // group).to(torch.int32),
    }


def _awq_tensors(base: str, rounded: Rounded) -> Tensors:
    order = torch.tensor(_AWQ_COLUMNS)

    def words(values: Tensor) -> Tensor:
        turned = values.t()
        return _words(turned.reshape(len(turned), -1, 8)[..., order].reshape(turned.shape))

    return {
        f"{base}.qweight": words(rounded.values),
        f"{base}.qzeros": words(rounded.zeros),
        f"{base}.scales": rounded.scale.t().half(),
    }
