"""Attention by FlashInfer's kernels, beside our own for all the rest: `engine.attention: flashinfer`.

FlashInfer (Ye et al., MLSys 2025) plans on the host and runs on the device: `plan` cuts the step's contexts
into equal work and copies that to the device, and `run` attends with it, once per layer. So it must hear of a
step from the host (`plan`), and its launches differ from step to step: such steps are never captured into
graphs.

    plan      what the host knows: rows, lengths           -> index pointers, page ids (gathered on the
                                                           device)
    attend    first layer of its kind (scale, window, cap)  -> wrapper.plan
              every layer                                   -> wrapper.run

A plan is written into pinned memory that its copy reads later. So there is one wrapper for each step that may
be under way, in turns: when one is used again, its last step is over. Not run on a GPU yet.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.engine.gpu.ops import AttentionLayer, HeadRotation, Ops, Partials
from penstock.engine.gpu.step import DeviceStep, Drawn, Int32Array, RowState
from penstock.engine.kv_cache import KVCache
from penstock.errors import ConfigError
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

WORKSPACE_BYTES = 128 << 20
"""Scratch for pieces of contexts, shared by all wrappers: what FlashInfer's documentation advises."""
STEPS_UNDER_WAY = 3
"""`DeviceRunner.FLIGHTS`."""
HEAD_DIMS = (64, 128, 256)
"""The head sizes that its kernels are compiled for."""
_TENSOR_CORES_FROM = 4
"""Query heads per key head from which its decode kernels for tensor cores pay; those without know 1, 2, 4 and
8 only."""


class Wrapper(Protocol):
    """The used part of FlashInfer's wrappers; their arguments go by keyword."""

    def plan(self, *args: Tensor, **kwargs: Any) -> None:  # noqa: ANN401
        """Describe a step."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Attend."""
        ...


@dataclass(slots=True, frozen=True)
class Contexts:
    """A step for FlashInfer. Index pointers are the host's, page ids the device's."""

    query_starts: Tensor
    """`[num_rows + 1]` int32."""
    page_starts: Tensor
    """`[num_rows + 1]` int32: where each row's page ids begin in `pages`."""
    pages: Tensor
    """int32 block ids, row by row."""
    last_page_tokens: Tensor
    """`[num_rows]` int32: how full each row's last block is, from 1 to 16."""
    decode_only: bool

    @classmethod
    def of(
        cls, rows: Int32Array, computed: Int32Array, num_tokens: Int32Array, state: RowState
    ) -> "Contexts":
        """The KV that the rows read: everything up to their last new token. Asks the device for nothing."""
        ends = computed + num_tokens
        counts = -(-ends // BLOCK_TOKENS)
        starts = _starts(counts)
        device, total = state.block_tables.device, int(starts[-1])
        numbers = as_tensor(np.stack((rows, counts, starts[:-1]))).to(device, non_blocking=True).long()
        row, first = (
            torch.repeat_interleave(each, numbers[1], output_size=total) for each in (numbers[0], numbers[2])
        )
        place = torch.arange(total, device=device) - first
        return cls(
            query_starts=as_tensor(_starts(num_tokens)),
            page_starts=as_tensor(starts),
            pages=state.block_tables[row, place].int(),
            last_page_tokens=as_tensor((ends - 1) % BLOCK_TOKENS + 1),
            decode_only=bool((num_tokens == 1).all()),
        )


class FlashInferOps:
    """See `Ops`: FlashInfer's attention, and the rest by `others`."""

    name = "flashinfer"
    captures = False

    def __init__(self, others: Ops, device: torch.device, package: Any) -> None:  # noqa: ANN401
        """`package` is the module `flashinfer`."""
        self._others, self._package, self.matrices = others, package, others.matrices
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[object, ...], Wrapper] = {}
        self._planned: dict[tuple[object, ...], Wrapper] = {}  # For the step that is being launched.
        self._contexts: Contexts | None = None
        self._turn = 0

    def check(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """See `Ops`.

        Raises:
            ConfigError: FlashInfer has no kernel for the model.
        """
        self._others.check(spec, dtype)
        if spec.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"engine.attention is flashinfer, which has no kernels for heads of {spec.head_dim} (only "
                f"{HEAD_DIMS})"
            )
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"engine.attention is flashinfer, which does not compute in {dtype}")

    def plan(self, rows: Int32Array, computed: Int32Array, num_tokens: Int32Array, state: RowState) -> None:
        """See `Ops`."""
        self._contexts = Contexts.of(rows, computed, num_tokens, state)
        self._planned = {}
        self._turn = (self._turn + 1) % STEPS_UNDER_WAY

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        cache: KVCache,
        step: DeviceStep,
        how: AttentionLayer,
        partials: Partials,
    ) -> None:
        """See `Ops`."""
        kind = (how.scale, how.softcap, how.window)
        wrapper = self._planned.get(kind)
        if wrapper is None:
            wrapper = self._planned[kind] = self._plan(kind, q, cache, how)
        layer = cache.tensor[:, how.layer]
        wrapper.run(q, (layer[:, 0], layer[:, 1]), out=out)

    def prepare(self, step: DeviceStep, slots_per_block: int) -> None:
        """See `Ops`."""
        self._others.prepare(step, slots_per_block)

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        self._others.norm(x, weight, eps, out)

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        self._others.add_norm(residual, x, weight, eps, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        self._others.silu_mul(gate_up, out)

    def gelu_tanh_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        self._others.gelu_tanh_mul(gate_up, out)

    def rotate_store(
        self, qkv: Tensor, q: Tensor, cache: KVCache, layer: int, step: DeviceStep, rotation: HeadRotation
    ) -> None:
        """See `Ops`."""
        self._others.rotate_store(qkv, q, cache, layer, step, rotation)

    def sample(self, logits: Tensor, step: DeviceStep, drawn: Drawn) -> None:
        """See `Ops`."""
        self._others.sample(logits, step, drawn)

    def _plan(self, kind: tuple[object, ...], q: Tensor, cache: KVCache, how: AttentionLayer) -> Wrapper:
        """The step's plan for layers that attend in this way."""
        step = self._contexts
        assert step is not None, "plan the step first"
        num_heads, options = q.shape[1], {
            "num_qo_heads": q.shape[1],
            "num_kv_heads": cache.num_kv_heads,
            "page_size": BLOCK_TOKENS,
            "sm_scale": how.scale,
            "window_left": how.window - 1 if how.window else -1,  # Theirs leaves the query itself out.
            "logits_soft_cap": how.softcap,
            "q_data_type": q.dtype,
            "kv_data_type": cache.tensor.dtype,
        }  # fmt: skip
        wrapper = self._wrapper((*kind, step.decode_only, self._turn), num_heads // cache.num_kv_heads)
        if step.decode_only:
            wrapper.plan(
                step.page_starts, step.pages, step.last_page_tokens, head_dim=cache.head_dim, **options
            )
        else:
            wrapper.plan(
                step.query_starts,
                step.page_starts,
                step.pages,
                step.last_page_tokens,
                head_dim_qk=cache.head_dim,
                causal=True,
                **options,
            )
        return wrapper

    def _wrapper(self, key: tuple[object, ...], group_size: int) -> Wrapper:
        found = self._wrappers.get(key)
        if found is None:
            if key[-2]:
                found = self._package.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    "NHD",
                    use_tensor_cores=group_size >= _TENSOR_CORES_FROM or group_size == 3,
                )
            else:
                found = self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[key] = found
        return found


def flashinfer_ops(others: Ops, device: torch.device) -> FlashInferOps:
    """FlashInfer's attention on a device.

    Raises:
        ConfigError: the package is not installed, or cannot be imported.
    """
    try:
        package = importlib.import_module("flashinfer")
    except Exception as error:  # It loads libraries of the driver: whatever goes wrong there.
        raise ConfigError(
            f"engine.attention is flashinfer, but that cannot be imported (pip install "
            f"'penstock[flashinfer]'): {error}"
        ) from error
    return FlashInferOps(others, device, package)


def _starts(counts: Int32Array) -> Int32Array:
    """Where each of so many begins, and the end of all."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
