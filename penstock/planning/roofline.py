"""How long a step takes on a named accelerator: a roofline of a model's shape.

After (Williams, Waterman and Patterson, CACM 2009), for a step of T tokens in S rows on `tp` devices:

    bytes  = (dense weights + experts reached by T tokens) + KV bytes of every stored token that is read
    flops  = 2 T active weights + 2 S output projection + 4 layers heads head_dim (query, key) pairs
    step   = overhead + max(bytes / (tp bandwidth e_memory), flops / (tp peak e_compute)) + communication

Communication is two all-reduces per layer of T x hidden activations: a ring moves 2 (tp - 1) / tp of them
over the link (Shoeybi et al., Megatron-LM, 2019), plus a latency each. The efficiencies e are what good
kernels reach of the data sheet. No randomness here: who wants jitter multiplies.
"""

from dataclasses import dataclass

from penstock.clock import NS_PER_S
from penstock.errors import ConfigError
from penstock.planning.accelerators import Accelerator
from penstock.planning.model_shapes import BYTES_PER_WEIGHT, ModelShape
from penstock.planning.step_time import StepShape
from penstock.types import BLOCK_TOKENS

ACTIVATION_BYTES = 2


@dataclass(slots=True, frozen=True, kw_only=True)
class Efficiency:
    """What is reached of the data sheet's figures. Defaults: what well-tuned engines report."""

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
    """`StepTime` of a placed model. What does not depend on the step is multiplied out once."""

    __slots__ = (
        "_active", "_dense", "_expert", "_experts", "_kv", "_link_fixed", "_link_token", "_model",
        "_overhead", "_pair", "_sampled",
    )  # fmt: skip

    def __init__(self, placed: Placed, efficiency: Efficiency | None = None) -> None:
        eff, model, device = efficiency or Efficiency(), placed.model, placed.device
        width = BYTES_PER_WEIGHT[placed.dtype]
        # What is stored in few bits is multiplied in the type above it where the device has no such unit.
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
        return max(1, round(self._overhead + max(memory, compute) + link))

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
