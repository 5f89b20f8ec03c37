"""The native kernels one by one, on torch tensors, for tests and benches: every shape is checked
here, before an address leaves Python.

Tensors live on the CPU with unit inner stride; rows may lie further apart (views of a wider tensor are fine).
Outputs are written into `out` when given. For any row of any operation the bits of the result depend on that
row's inputs alone: not on the other rows, their number, how a prompt was cut into chunks, or the number of
threads.
"""

from ctypes import pointer
from dataclasses import dataclass
from typing import cast

import torch

from penstock.engine.native.decoder import TYPES, LayerCache
from penstock.engine.native.library import (
    NativeLibrary,
    PsAttention,
    PsLinear,
    PsNorm,
    PsSiluMul,
    RopeWrite,
    Type,
)
from penstock.engine.native.weights import NativeWeight

_INPUTS = {
    Type.F32: (Type.F32,),
    Type.BF16: (Type.BF16,),
    Type.I8: (Type.BF16, Type.F32),
    Type.I4: (Type.BF16, Type.F32),
}


def linear(
    kernels: NativeLibrary,
    weight: NativeWeight,
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x [m, k] @ W.T + bias + residual`, rounded once at the end; `residual` [m, n] may be `out` itself.

    x is bfloat16 or float32 like the weight; either for int8 weights, bfloat16 for four-bit ones.
    """
    kind = _matrix("x", x, weight.k)
    if kind not in _INPUTS[weight.kind]:
        raise ValueError(f"x is {x.dtype}, the weight {weight.kind.name}")
    m = x.shape[0]
    if out is None:
        out = torch.empty(m, weight.n, dtype=out_dtype or x.dtype)
    y_type = _matrix("out", out, weight.n, m)
    if residual is not None and _matrix("residual", residual, weight.n, m) is not y_type:
        raise ValueError(f"residual is {residual.dtype}, out {out.dtype}")
    job = linear_job(weight, x, out)
    if residual is not None:
        job.residual, job.ldr = residual.data_ptr(), residual.stride(0)
    kernels.linear(job)
    return out


def linear_job(weight: NativeWeight, x: torch.Tensor, out: torch.Tensor) -> PsLinear:
    """One product, ready to be asked for while its weight and tensors live."""
    return PsLinear(
        weight=pointer(weight.struct), x=x.data_ptr(), y=out.data_ptr(), residual=None, m=x.shape[0],
        ldx=x.stride(0), ldy=out.stride(0), ldr=0, x_type=int(TYPES[x.dtype]), y_type=int(TYPES[out.dtype]),
    )  # fmt: skip


def rms_norm(
    kernels: NativeLibrary,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over rows [m, n]; weight [n] is float32.

    With `residual` [m, n]: `residual += x` in place first, and that sum is normalized. With `add` the result
    is added to `out`, rounded once.
    """
    if add and out is None:
        raise ValueError("add needs an out to add to")
    n = weight.numel()
    kind = _matrix("x", x, n)
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    _vector("weight", weight, n)
    for name, other in (("out", out), ("residual", residual)):
        if other is not None and _matrix(name, other, n, x.shape[0]) is not kind:
            raise ValueError(f"{name} is {other.dtype}, x {x.dtype}")
    kernels.rms_norm(
        PsNorm(
            x=x.data_ptr(), residual=None if residual is None else residual.data_ptr(),
            weight=weight.data_ptr(), y=out.data_ptr(), m=x.shape[0], n=n, ldx=x.stride(0),
            ldr=0 if residual is None else residual.stride(0), ldy=out.stride(0), eps=eps, type=int(kind),
            add=int(add),
        )
    )  # fmt: skip
    return out


def silu_mul(kernels: NativeLibrary, x: torch.Tensor) -> torch.Tensor:
    """`silu(x[:, :n]) * x[:, n:]` for x [m, 2n] -> [m, n]."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x must be [m, 2n], not {list(x.shape)}")
    m, n = x.shape[0], x.shape[1] // 2
    kind = _matrix("x", x, 2 * n)
    out = torch.empty(m, n, dtype=x.dtype)
    kernels.silu_mul(
        PsSiluMul(
            x=x.data_ptr(), y=out.data_ptr(), m=m, n=n, ldx=x.stride(0), ldy=out.stride(0), type=int(kind)
        )
    )
    return out


@dataclass(slots=True, frozen=True, kw_only=True)
class Rope:
    """Rotation tables, and the q/k norm that some models put before it."""

    cos: torch.Tensor
    """[num_positions, rotary_dim / 2] float32, scaling included."""
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    """[head_dim] float32."""
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6


def rope_write(
    kernels: NativeLibrary,
    qkv: torch.Tensor,
    rope: Rope,
    cache: LayerCache,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate q and k, store k and v in the cache, return q [t, num_q_heads * head_dim].

    qkv is [t, (num_q_heads + 2 * num_kv_heads) * head_dim] in the cache's type; positions [t] int64, below
    the tables' length; slots [t] int64, `block * block_size + offset`, where -1 stores nothing.
    """
    dim, t = cache.head_dim, qkv.shape[0]
    q_size = qkv.shape[1] - 2 * cache.num_kv_heads * dim
    if q_size <= 0 or q_size % dim or qkv.dtype != cache.dtype:
        raise ValueError(
            f"qkv {list(qkv.shape)} {qkv.dtype} does not fit {cache.num_kv_heads} KV heads of {dim}"
        )
    _matrix("qkv", qkv, qkv.shape[1])
    out = torch.empty(t, q_size, dtype=qkv.dtype)
    half = rope.cos.shape[-1]
    if rope.cos.shape != rope.sin.shape or rope.cos.dim() != 2 or 2 * half > dim:
        raise ValueError(
            f"cos {list(rope.cos.shape)} and sin {list(rope.sin.shape)} must be [positions, <= {dim // 2}]"
        )
    for name, table in (("cos", rope.cos), ("sin", rope.sin)):
        _vector(name, table, rope.cos.numel())
    for name, norm in (("q_norm", rope.q_norm), ("k_norm", rope.k_norm)):
        if norm is not None:
            _vector(name, norm, dim)
    for name, ids, bound in (
        ("positions", positions, rope.cos.shape[0]),
        ("slots", slots, cache.num_blocks * cache.block_size),
    ):
        if ids.dtype != torch.int64 or ids.shape != (t,) or not ids.is_contiguous():
            raise ValueError(f"{name} must be [{t}] int64, not {list(ids.shape)} {ids.dtype}")
        if t and int(ids.max()) >= bound:
            raise ValueError(f"{name} has {int(ids.max())}, but the bound is {bound}")
    kernels.rope_write(
        RopeWrite(
            qkv=qkv.data_ptr(), q=out.data_ptr(), cos=rope.cos.data_ptr(), sin=rope.sin.data_ptr(),
            q_norm=None if rope.q_norm is None else rope.q_norm.data_ptr(),
            k_norm=None if rope.k_norm is None else rope.k_norm.data_ptr(),
            positions=positions.data_ptr(), slots=slots.data_ptr(), cache=cache.struct, t=t,
            ld_qkv=qkv.stride(0), ld_q=out.stride(0), num_q_heads=q_size // dim, rotary_dim=2 * half,
            eps=rope.eps,
        )
    )  # fmt: skip
    return out


@dataclass(slots=True, frozen=True, kw_only=True)
class Rows:
    """The rows of a step as attention needs them: decode rows and chunks of prompts alike."""

    block_tables: torch.Tensor
    """[rows, max_blocks] int32."""
    query_starts: torch.Tensor
    """[rows + 1] int32: row r's new tokens are [query_starts[r], query_starts[r + 1])."""
    context_lens: torch.Tensor
    """[rows] int32: tokens of the row including the new ones, all stored in the cache."""

    def check(self, num_tokens: int, num_blocks: int, block_size: int) -> None:
        """Refuse what would make a kernel read outside of its buffers.

        Raises:
            ValueError: which table is wrong and how.
        """
        count = self.context_lens.shape[0]
        for name, table, shape in (
            ("block_tables", self.block_tables, (count, self.block_tables.shape[-1])),
            ("query_starts", self.query_starts, (count + 1,)),
            ("context_lens", self.context_lens, (count,)),
        ):
            if table.dtype != torch.int32 or table.shape != shape or table.stride(-1) != 1:
                raise ValueError(f"{name} must be {list(shape)} int32, not {list(table.shape)} {table.dtype}")
        starts = cast(list[int], self.query_starts.tolist())  # pyright: ignore[reportUnknownMemberType]
        lens = cast(list[int], self.context_lens.tolist())  # pyright: ignore[reportUnknownMemberType]
        if starts[0] != 0 or starts[-1] != num_tokens:
            raise ValueError(f"query_starts must run from 0 to {num_tokens}, not {starts[0]} to {starts[-1]}")
        for row, length in enumerate(lens):
            if not 0 <= starts[row + 1] - starts[row] <= length:
                raise ValueError(f"row {row}: {starts[row + 1] - starts[row]} new tokens of {length} in all")
            blocks = -(-length // block_size)
            if blocks > self.block_tables.shape[1]:
                raise ValueError(f"row {row}: {length} tokens need {blocks} blocks")
        if count and not 0 <= int(self.block_tables.min()) <= int(self.block_tables.max()) < num_blocks:
            raise ValueError(f"block_tables must name blocks below {num_blocks}")


def paged_attention(
    kernels: NativeLibrary,
    q: torch.Tensor,
    cache: LayerCache,
    rows: Rows,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [t, num_q_heads * head_dim] over each row's cached tokens; same shape out.

    Query heads share KV heads in groups, in order. `window` > 0 limits a query to the last `window`
    positions, its own included; `softcap` > 0 turns scores s into `softcap * tanh(s / softcap)`. `rows.check`
    is the caller's to run once per step.
    """
    kind = _matrix("q", q, q.shape[1])
    if kind is not TYPES[cache.dtype] or q.shape[1] % (cache.num_kv_heads * cache.head_dim):
        raise ValueError(
            f"q {list(q.shape)} {q.dtype} does not fit the cache: {cache.num_kv_heads} x {cache.head_dim}"
        )
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    if _matrix("out", out, q.shape[1], q.shape[0]) is not kind:
        raise ValueError(f"out is {out.dtype}, q {q.dtype}")
    kernels.attention(
        PsAttention(
            q=q.data_ptr(), out=out.data_ptr(), block_tables=rows.block_tables.data_ptr(),
            query_starts=rows.query_starts.data_ptr(), context_lens=rows.context_lens.data_ptr(),
            cache=cache.struct, rows=rows.context_lens.shape[0], ld_tables=rows.block_tables.stride(0),
            ld_q=q.stride(0), ld_out=out.stride(0), num_q_heads=q.shape[1] // cache.head_dim, window=window,
            scale=scale, softcap=softcap,
        )
    )  # fmt: skip
    return out


def _matrix(name: str, tensor: torch.Tensor, columns: int, rows: int | None = None) -> Type:
    """The type of a matrix that the kernels can read, or a refusal that names it."""
    kind = TYPES.get(tensor.dtype)
    shape = tensor.shape
    if (
        kind is None
        or len(shape) != 2
        or shape[1] != columns
        or (rows is not None and shape[0] != rows)
        or tensor.stride(1) != 1
        or tensor.is_cuda
    ):
        wanted = f"[{'m' if rows is None else rows}, {columns}] bfloat16 or float32 with unit inner stride"
        raise ValueError(
            f"{name} must be {wanted}, not {list(shape)} {tensor.dtype} with strides {tensor.stride()}"
        )
    return kind


def _vector(name: str, tensor: torch.Tensor, size: int) -> None:
    if tensor.dtype != torch.float32 or tensor.numel() != size or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {size} contiguous float32 values, not {list(tensor.shape)} {tensor.dtype}"
        )
