"""How long a step takes on a named accelerator: a roofline of a model's shape.

After (Williams, Waterman and Patterson, CACM 2009), for a step of T tokens in S rows on `tp` devices:

    bytes  = (dense weights + experts reached by T tokens) + KV bytes of every stored token that is read
    flops  = 2 T active weights + 2 S output projection + 4 layers heads head_dim (query, key) pairs
    step   = overhead + max(bytes / (tp bandwidth e_memory), flops / (tp peak e_compute)) + communication

Communication is two all-reduces per layer of T x hidden activations: a ring moves 2 (tp - 1) / tp of them
over the link (Shoeybi et al., Megatron-LM, 2019), plus a latency each. The efficiencies e are what good
kernels reach of the data sheet. No randomness here: who wants jitter multiplies.

Accelerators by name: what the roofline and the planner count with.

Every figure is a default that may be replaced.

Memory, bandwidth and peaks are the vendors' data sheets (dense, without sparsity; links: one direction).
Prices are what rental companies asked on demand for one of them per hour in 2025, rounded: replace them by
your own contract's. `cpu-2` is the two-core machine that this repository's figures come from
(docs/bench-results.md): from its own measured steps.

Shapes of models, as far as they cost time and memory: named ones, and those of a `config.json`.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.clock import NS_PER_S
from penstock.errors import ConfigError
from penstock.models.config import CONFIG_FILE, HfConfig, positive, read_config_file
from penstock.models.files import read_config
from penstock.schedule.step import StepShape
from penstock.types import BLOCK_TOKENS

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(slots=True, frozen=True, kw_only=True)
class Accelerator:
    """One device. Peaks are in operations per second, bandwidths in bytes per second."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Of the device's memory."""
    peak: Mapping[str, float]
    """Dense matrix products, by type: "bf16", "fp8", "int8", "fp32"."""
    link: float
    """To its neighbours (NVLink, or the bus), one direction."""
    price_per_hour: float
    """USD."""
    source: str
    overhead_ns: int = 1_500_000
    """Of one step, whatever it computes: launches, planning, sampling."""

    def peak_of(self, dtype: str) -> float:
        """Operations per second in a type.

        Raises:
            ConfigError: the device does not compute in it.
        """
        if dtype not in self.peak:
            raise ConfigError(
                f"dtype: {self.name} does not compute in {dtype}; it knows {', '.join(self.peak)}"
            )
        return self.peak[dtype]


def _device(
    name: str,
    gigabytes: float,
    tb_per_s: float,
    peak: Mapping[str, float],
    link_gb: float,
    price: float,
    source: str,
) -> Accelerator:
    return Accelerator(
        name=name, memory_bytes=int(gigabytes * GB), bandwidth=tb_per_s * TB, link=link_gb * GB,
        peak={dtype: value * TFLOPS for dtype, value in peak.items()}, price_per_hour=price, source=source,
    )  # fmt: skip


ACCELERATORS: Mapping[str, Accelerator] = {
    device.name: device
    for device in (
        _device("h100", 80, 3.35, {"bf16": 989, "fp8": 1979, "int8": 1979, "fp32": 67}, 450, 3.0,
            "NVIDIA H100 "
        "SXM"),
        _device("h200", 141, 4.8, {"bf16": 989, "fp8": 1979, "int8": 1979, "fp32": 67}, 450, 3.8,
            "NVIDIA H200 "
        "SXM"),
        _device("b200", 180, 7.7, {"bf16": 2250, "fp8": 4500, "fp4": 9000, "fp32": 75}, 900, 5.5,
            "NVIDIA HGX B200"),
        _device("a100-80", 80, 2.039, {"bf16": 312, "int8": 624, "fp32": 19.5}, 300, 1.8, "NVIDIA A100 80GB "
        "SXM"),
        _device("a100-40", 40, 1.555, {"bf16": 312, "int8": 624, "fp32": 19.5}, 300, 1.3, "NVIDIA A100 40GB "
        "SXM"),
        _device("l40s", 48, 0.864, {"bf16": 362, "fp8": 733, "int8": 733, "fp32": 91.6}, 32, 1.0,
            "NVIDIA L40S"),
        _device("l4", 24, 0.3, {"bf16": 121, "fp8": 242, "int8": 242, "fp32": 30.3}, 32, 0.7, "NVIDIA L4"),
        _device("a10g", 24, 0.6, {"bf16": 70, "int8": 140, "fp32": 35}, 32, 1.0, "NVIDIA A10G, AWS g5"),
        _device("mi300x", 192, 5.3, {"bf16": 1307, "fp8": 2615, "int8": 2615, "fp32": 163}, 448, 2.5,
            "AMD MI300X"),
        _device("cpu-2", 8, 0.02, {"bf16": 0.16, "int8": 0.32, "fp32": 0.16}, 0.1, 0.08,
            "measured: docs/bench-results.md"),
    )
}  # fmt: skip


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name.

    Raises:
        ConfigError: there is none; the message has the nearest name.
    """
    if (found := ACCELERATORS.get(name.lower())) is not None:
        return found
    raise ConfigError(f"accelerator: {unknown(name, ACCELERATORS)}")


def unknown(name: str, known: Mapping[str, object]) -> str:
    """Words for a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"{name!r} is not known; {hint}"


BYTES_PER_WEIGHT: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5, "int4": 0.5}
MAX_MODEL_LEN = 131_072
"""Where a model does not say how long its context is."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward layer, maybe of experts."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward layer, or of each expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    top_k: int = 0
    tied_head: bool = False
    max_model_len: int = MAX_MODEL_LEN

    @property
    def attention_parameters(self) -> int:
        """Of all layers' attention: queries, keys, values and output."""
        return self.num_layers * self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one expert in every layer; of the whole feed-forward part where there are no experts."""
        return self.num_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Of the output projection."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights (norms and router aside, which are less than a thousandth)."""
        embeddings = self.head_parameters * (1 if self.tied_head else 2)
        return embeddings + self.attention_parameters + self.expert_parameters * max(1, self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, the output projection aside."""
        return self.attention_parameters + self.expert_parameters * max(1, self.top_k)

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Keys and values of one token over all layers: 2 x layers x KV heads x head size x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    def touched_experts(self, num_tokens: int) -> float:
        """Experts per layer that `num_tokens` tokens reach, if they choose evenly; 1 where there are no
        experts.
        """
        if not self.num_experts:
            return 1.0
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("28m", 8, 512, 1088, 8, 4, 64, 16_384, tied_head=True, max_model_len=4096),
        # Qwen2.5-0.5B
        ModelShape("0.5b", 24, 896, 4864, 14, 2, 64, 151_936, tied_head=True, max_model_len=32_768),
        ModelShape("7b", 32, 4096, 14_336, 32, 8, 128, 32_000, max_model_len=32_768),  # Mistral-7B
        ModelShape("8b", 32, 4096, 14_336, 32, 8, 128, 128_256),  # Llama-3.1-8B
        ModelShape("13b", 40, 5120, 13_824, 40, 40, 128, 32_000, max_model_len=4096),  # Llama-2-13B
        ModelShape("70b", 80, 8192, 28_672, 64, 8, 128, 128_256),  # Llama-3.1-70B
        # Mixtral-8x7B
        ModelShape(
            "8x7b", 32, 4096, 14_336, 32, 8, 128, 32_000, num_experts=8, top_k=2, max_model_len=32_768
        ),
        ModelShape("30b-a3b", 48, 2048, 768, 32, 4, 128, 151_936, num_experts=128, top_k=8),  # Qwen3-30B-A3B
    )
}


def model_shape(name: str) -> ModelShape:
    """The shape of a known name, or of the `config.json` at (or in the directory) `name`.

    Raises:
        ConfigError: it is neither; the message has the nearest name.
        CheckpointError: the file is not a decoder's configuration.
    """
    if (found := MODELS.get(name.lower())) is not None:
        return found
    path = Path(name).expanduser()
    path = path / CONFIG_FILE if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return shape_of_config(path)
    if path.is_file():
        return _shape(read_config(path), path.stem)
    raise ConfigError(
        f"model: {unknown(name, MODELS)} (or give a directory with a config.json, or a GGUF file)"
    )


def shape_of_config(path: Path) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes.

    Raises:
        CheckpointError: it cannot be read, or a number is missing or absurd.
    """
    return _shape(read_config_file(path), path.parent.name)


def _shape(whole: HfConfig, name: str) -> ModelShape:
    config = whole.text_config or whole
    num_experts = config.num_local_experts or config.num_experts or 0
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    intermediate_size = (config.moe_intermediate_size if num_experts else None) or positive(
        config, "intermediate_size"
    )
    return ModelShape(
        name=name,
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=config.head_dim or hidden_size // num_heads,
        vocab_size=positive(config, "vocab_size"),
        num_experts=num_experts,
        top_k=(config.num_experts_per_tok or 1) if num_experts else 0,
        tied_head=bool(config.tie_word_embeddings),
        max_model_len=config.max_position_embeddings or MAX_MODEL_LEN,
    )


ACTIVATION_BYTES = 2


@dataclass(slots=True, frozen=True, kw_only=True)
class Efficiency:
    """The share of the data sheet's figures that is reached. Defaults: what well-tuned engines report."""

    memory: float = 0.85
    compute: float = 0.6
    link: float = 0.7
    all_reduce_ns: int = 10_000
    """Latency of one, before any byte."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Placed:
    """A model on `tp` devices of one kind: one replica."""

    model: ModelShape
    device: Accelerator
    tp: int = 1
    dtype: str = "bf16"
    """Of the weights and the products."""
    kv_bytes: float = 2
    """Of one key or value."""
    memory_fraction: float = 0.92
    """Of the devices' memory, for weights, KV cache and working space."""

    def __post_init__(self) -> None:
        if self.dtype not in BYTES_PER_WEIGHT:
            raise ConfigError(f"dtype: {self.dtype!r} is none of {', '.join(BYTES_PER_WEIGHT)}")
        if self.tp < 1 or self.model.num_heads % self.tp:
            raise ConfigError(
                f"tp: {self.tp} does not divide the {self.model.num_heads} heads of {self.model.name}"
            )

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.model.num_parameters * BYTES_PER_WEIGHT[self.dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """Over all devices: KV heads are copied where there are fewer of them than devices."""
        copies = max(1.0, self.tp / self.model.num_kv_heads)
        return self.model.kv_bytes_per_token(self.kv_bytes) * copies

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit beside the weights and a tenth of them (at most 4 GB per device) to work in.

        Raises:
            ConfigError: the weights alone do not fit.
        """
        space = self.device.memory_bytes * self.memory_fraction * self.tp
        room = space - self.weight_bytes - min(0.1 * self.weight_bytes, 4e9 * self.tp)
        blocks = int(room / (self.kv_bytes_per_token * BLOCK_TOKENS))
        if blocks < 1:
            raise ConfigError(
                f"tp: the weights of {self.model.name} in {self.dtype} ({self.weight_bytes / 1e9:.0f} GB) do "
                f"not fit {self.tp} x {self.device.name} ({self.tp * self.device.memory_bytes / 1e9:.0f} GB)"
            )
        return blocks

    @property
    def price_per_hour(self) -> float:
        """Of the replica."""
        return self.tp * self.device.price_per_hour


class Roofline:
    """`StepTime` of a placed model. The terms that do not depend on the step are multiplied out once."""

    __slots__ = (
        "_active", "_dense", "_expert", "_experts", "_kv", "_link_fixed", "_link_token", "_model",
        "_overhead", "_pair", "_sampled",
    )  # fmt: skip

    def __init__(self, placed: Placed, efficiency: Efficiency | None = None) -> None:
        eff, model, device = efficiency or Efficiency(), placed.model, placed.device
        width = BYTES_PER_WEIGHT[placed.dtype]
        # A weight that is stored in few bits is multiplied in the type above it where the device has no such
        # unit.
        compute = placed.dtype if placed.dtype in device.peak else _unpacked(placed)
        byte_ns = NS_PER_S / (placed.tp * device.bandwidth * eff.memory)
        flop_ns = NS_PER_S / (placed.tp * device.peak_of(compute) * eff.compute)
        self._model, self._overhead = model, device.overhead_ns
        self._dense = (model.attention_parameters + model.head_parameters) * width * byte_ns
        self._expert = model.expert_parameters * width * byte_ns
        self._kv = placed.kv_bytes_per_token * byte_ns
        self._active = 2 * model.active_parameters * flop_ns
        self._sampled = 2 * model.head_parameters * flop_ns
        self._pair = 4 * model.num_layers * model.num_heads * model.head_dim * flop_ns
        reduced = 2 * (placed.tp - 1) / placed.tp * model.hidden_size * ACTIVATION_BYTES
        parallel = placed.tp > 1
        self._link_fixed = 2.0 * model.num_layers * eff.all_reduce_ns * parallel
        self._link_token = 2 * model.num_layers * reduced * NS_PER_S / (device.link * eff.link)
        self._experts: dict[int, float] = {}

    def step_ns(self, shape: StepShape) -> int:
        """See `StepTime`."""
        memory, compute, link = self.parts_ns(shape)
        longer = compute if compute > memory else memory
        return round(self._overhead + longer + link) or 1

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        """See `StepTime`. Only what is read of the KV cache differs from step to step, and is multiplied."""
        memory, compute, link = self.parts_ns(StepShape(rows, 0, 0, 0))
        kv, pair, overhead = self._kv, self._pair, self._overhead
        found: list[int] = []
        for count in kv_tokens:
            read, multiplied = memory + kv * count, compute + pair * count
            longer = multiplied if multiplied > read else read
            found.append(round(overhead + longer + link) or 1)
        return found

    def parts_ns(self, shape: StepShape) -> tuple[float, float, float]:
        """(memory, compute, communication) in nanoseconds: the larger of the first two counts."""
        decode_rows, prefill_rows, prefill_tokens, kv_tokens, pairs = shape
        tokens = decode_rows + prefill_tokens
        touched = self._experts.get(tokens)
        if touched is None:
            touched = self._experts[tokens] = self._model.touched_experts(tokens)
        memory = self._dense + self._expert * touched + self._kv * kv_tokens
        compute = self._active * tokens + self._sampled * (decode_rows + prefill_rows)
        compute += self._pair * (pairs + kv_tokens)
        return memory, compute, self._link_fixed + self._link_token * tokens


def _unpacked(placed: Placed) -> str:
    return next(dtype for dtype in ("fp8", "bf16", "fp32") if dtype in placed.device.peak)


class CostFloor:
    """The least time in which a device does the work of an engine's steps: what its cost is measured against.

    Every step counts as if the batch had been full, so that each of its rows reads its part of the weights,
    and as if the device moved bytes and multiplied as fast as it was measured to, with nothing in between:

        floor = max(weights * decode rows / full batch + KV bytes read, flops)

    The full batch is the rows that the engine has, or as many contexts as long as those of the step as fit
    its KV cache. `memory_ns` is what the bytes of the steps really take at that bandwidth: over the time of
    the steps this is model bandwidth utilisation (MBU).
    """

    def __init__(self, placed: Placed, *, rows: int, kv_tokens: int) -> None:
        """`rows` run at once at most; the KV cache has `kv_tokens`."""
        assert rows > 0 < kv_tokens, (rows, kv_tokens)
        self._roofline = Roofline(placed, Efficiency(memory=1.0, compute=1.0))
        self._rows, self._kv_tokens = rows, kv_tokens
        self._full = self._roofline.parts_ns(StepShape(rows, 0, 0, 0))[0]
        self._kv_ns = placed.kv_bytes_per_token * NS_PER_S / (placed.tp * placed.device.bandwidth)
        self.memory_ns = self.floor_ns = 0.0
        """Of all steps so far."""

    def count(self, shape: StepShape) -> None:
        """A step is over."""
        decode_rows, prefill_rows, _, kv_tokens, _ = shape
        num_rows, rows = decode_rows + prefill_rows, self._rows
        if not num_rows:
            return  # It waited for copies.
        memory, compute, _ = self._roofline.parts_ns(shape)
        kv = self._kv_ns * kv_tokens
        if kv_tokens * rows > self._kv_tokens * num_rows:
            rows = max(num_rows, self._kv_tokens * num_rows // kv_tokens)
        weights = min(memory - kv, self._full * decode_rows / rows)
        self.memory_ns += memory
        self.floor_ns += max(weights + kv, compute)
