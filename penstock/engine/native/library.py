"""The shared library and its C structs: how the kernels are found, started and called.

Mirrors `kernels/penstock_native.h` field by field and knows nothing of torch; `weights.py` and `decoder.py`
check shapes and fill the structs in. Calls release the interpreter's lock while they compute.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p, sizeof
from enum import IntEnum
from pathlib import Path

LIBRARY = Path(__file__).with_name("_kernels.so")
ABI_VERSION = 18
_OUT_OF_BOUNDS = -2
_SPIN_US = 50


class KernelsUnavailable(Exception):
    """The native kernels cannot run here; the message says why. The engine computes with torch instead."""


class Type(IntEnum):
    """Element types of the kernels."""

    F32 = 0
    BF16 = 1
    I8 = 2
    I4 = 3


class Epilogue(IntEnum):
    """The fate of a product's sums; a gate and its up share panels and give `act(gate) * up`."""

    PLAIN = 0
    SILU_MUL = 1
    GELU_MUL = 2
    """GELU in its tanh approximation."""


STEP_PARTS = ("norm", "qkv", "rope", "attention", "o", "gate_up", "down", "head", "rest")
"""The parts whose nanoseconds `PsStep.part_ns` counts, in the order of `PsPart`."""


class PsWeight(Structure):
    """`PsWeight`: a packed weight."""

    _fields_ = [
        ("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("offset", c_void_p), ("sums", c_void_p),
        ("order", c_void_p),
        ("n", c_int64), ("k", c_int64), ("k_padded", c_int64), ("panels", c_int64),
        ("type", c_int32), ("epilogue", c_int32), ("group", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class PsPack(Structure):
    """`PsPack`: a weight to be packed."""

    _fields_ = [
        ("first", c_void_p), ("second", c_void_p), ("out", c_void_p), ("n", c_int64), ("k", c_int64),
        ("k_padded", c_int64), ("type", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class PsLinear(Structure):
    """`PsLinear`."""

    _fields_ = [
        ("weight", POINTER(PsWeight)), ("x", c_void_p), ("y", c_void_p), ("residual", c_void_p),
        ("m", c_int64), ("ldx", c_int64), ("ldy", c_int64), ("ldr", c_int64),
        ("x_type", c_int32), ("y_type", c_int32),
    ]  # fmt: skip


class PsNorm(Structure):
    """`PsNorm`."""

    _fields_ = [
        ("x", c_void_p), ("residual", c_void_p), ("weight", c_void_p), ("y", c_void_p),
        ("m", c_int64), ("n", c_int64), ("ldx", c_int64), ("ldr", c_int64), ("ldy", c_int64),
        ("eps", c_float), ("type", c_int32), ("add", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class PsSiluMul(Structure):
    """`PsSiluMul`."""

    _fields_ = [
        ("x", c_void_p), ("y", c_void_p), ("m", c_int64), ("n", c_int64), ("ldx", c_int64), ("ldy", c_int64),
        ("type", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class KvCache(Structure):
    """`PsKvCache`: one layer of the paged cache."""

    _fields_ = [
        ("base", c_void_p), ("block_stride", c_int64), ("kv_stride", c_int64),
        ("block_size", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("type", c_int32),
        ("rounded", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class RopeWrite(Structure):
    """`PsRopeWrite`."""

    _fields_ = [
        ("qkv", c_void_p), ("q", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("positions", c_void_p), ("slots", c_void_p),
        ("cache", KvCache),
        ("t", c_int64), ("ld_qkv", c_int64), ("ld_q", c_int64),
        ("num_q_heads", c_int32), ("rotary_dim", c_int32), ("eps", c_float), ("reserved", c_int32),
    ]  # fmt: skip


class PsAttention(Structure):
    """`PsAttention`."""

    _fields_ = [
        ("q", c_void_p), ("out", c_void_p), ("block_tables", c_void_p), ("query_starts", c_void_p),
        ("context_lens", c_void_p), ("cache", KvCache),
        ("rows", c_int64), ("ld_tables", c_int64), ("ld_q", c_int64), ("ld_out", c_int64),
        ("num_q_heads", c_int32), ("window", c_int32), ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


class PsMlp(Structure):
    """`PsMlp`: a gated feed-forward layer."""

    _fields_ = [("gate_up", PsWeight), ("down", PsWeight)]


class Layer(Structure):
    """`PsLayer`: one block of the decoder."""

    _fields_ = [
        ("qkv", PsWeight), ("o", PsWeight), ("router", PsWeight), ("mlp", POINTER(PsMlp)),
        ("input_norm", c_void_p), ("post_attention_norm", c_void_p), ("attention_out_norm", c_void_p),
        ("mlp_out_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("cos", c_void_p),
        ("sin", c_void_p),
        ("window", c_int32), ("rotary_dim", c_int32),
    ]  # fmt: skip


class PsDecoder(Structure):
    """`PsDecoder`: a whole model."""

    _fields_ = [
        ("layers", POINTER(Layer)), ("embedding", c_void_p), ("final_norm", c_void_p),
        ("head", PsWeight), ("cache", KvCache), ("layer_stride", c_int64), ("num_layers", c_int64),
        ("hidden", c_int64), ("intermediate", c_int64), ("num_blocks", c_int64), ("num_positions", c_int64),
        ("num_q_heads", c_int32), ("eps", c_float), ("scale", c_float), ("softcap", c_float),
        ("embedding_scale", c_float), ("logit_softcap", c_float), ("top_k", c_int32), ("normalise", c_int32),
        ("vocab", c_int32),
    ]  # fmt: skip


class PsStep(Structure):
    """`PsStep`: what one step computes."""

    _fields_ = [
        ("token_ids", c_void_p), ("samples", c_void_p), ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p), ("logits", c_void_p), ("part_ns", c_void_p), ("t", c_int64),
        ("rows", c_int64),
        ("ld_tables", c_int64), ("num_samples", c_int64), ("adapters", c_void_p), ("states", c_void_p),
    ]  # fmt: skip


class AdapterPart(Structure):
    """`PsAdapterPart`: a low-rank addition to some of a linear's outputs."""

    _fields_ = [
        ("b", c_void_p), ("from_", c_int64), ("rank", c_int64), ("groups", c_int64), ("first", c_int64),
        ("stride", c_int64),
    ]  # fmt: skip


class AdapterLinear(Structure):
    """`PsAdapterLinear`: all of them of one linear."""

    _fields_ = [
        ("a", c_void_p), ("scale", c_void_p), ("parts", POINTER(AdapterPart)), ("num_parts", c_int64),
        ("panels", c_int64), ("k", c_int64),
    ]  # fmt: skip


class AdapterLayer(Structure):
    """`PsAdapterLayer`: an adapter's additions to one layer."""

    _fields_ = [(name, AdapterLinear) for name in ("qkv", "o", "gate_up", "down")]


class PsSample(Structure):
    """`PsSample`: one draw from every row of logits."""

    _fields_ = [
        ("logits", c_void_p), ("temperature", c_void_p), ("top_k", c_void_p), ("top_p", c_void_p),
        ("min_p_bound", c_void_p), ("keys", c_void_p), ("masks", c_void_p), ("mask_rows", c_void_p),
        ("token_ids", c_void_p), ("rows", c_int64), ("vocab", c_int64), ("ld_logits", c_int64),
        ("ld_masks", c_int64), ("greedy_below", c_float), ("reserved", c_int32),
    ]  # fmt: skip


class PsLookup(Structure):
    """`PsLookup`: guesses of rows' next tokens."""

    _fields_ = [
        ("token_ids", c_void_p), ("rows", c_void_p), ("known", c_void_p), ("limit", c_void_p),
        ("match_min", c_void_p), ("found", c_void_p), ("num_rows", c_int64), ("ld_tokens", c_int64),
        ("match_max", c_int64),
    ]  # fmt: skip


class PsDraft(Structure):
    """`PsDraft`: guesses of rows' next tokens, by a model."""

    _fields_ = [
        ("token_ids", c_void_p), ("rows", c_void_p), ("firsts", c_void_p), ("counts", c_void_p),
        ("limit", c_void_p), ("block_tables", c_void_p), ("logits", c_void_p), ("draw", PsSample),
        ("num_rows", c_int64), ("ld_tokens", c_int64), ("ld_tables", c_int64),
    ]  # fmt: skip


_CALLS: dict[str, type[Structure]] = {
    "ps_linear": PsLinear,
    "ps_rms_norm": PsNorm,
    "ps_silu_mul": PsSiluMul,
    "ps_rope_write": RopeWrite,
    "ps_attention": PsAttention,
    "ps_sample": PsSample,
    "ps_lookup": PsLookup,
}
_STRUCTS = (
    PsWeight,
    PsLinear,
    PsNorm,
    PsSiluMul,
    KvCache,
    RopeWrite,
    PsAttention,
    PsMlp,
    Layer,
    PsDecoder,
    PsStep,
    PsSample,
    AdapterPart,
    AdapterLinear,
    AdapterLayer,
    PsLookup,
    PsDraft,
    PsPack,
)
"""In the order of `ps_struct_bytes`."""


class NativeLibrary:
    """The loaded library. There is one per process: threads, scratch memory and the chosen ISA are shared.

    Raises:
        KernelsUnavailable: not built, built for another version, or no instruction set that it can use.
    """

    def __init__(self, path: Path = LIBRARY, isa: str | None = None) -> None:
        self._lib = _open(path)
        name = self._lib.ps_init((isa or os.environ.get("PENSTOCK_NATIVE_ISA", "")).encode())
        if name is None:
            raise KernelsUnavailable(f"this CPU does not have {isa or 'AVX2 and FMA'}")
        self.isa: str = name.decode()
        """`amx`, `avx512_bf16`, `avx512_vnni`, `avx512` or `avx2`. Bits are equal within one of them, not
        between them."""

    def set_threads(self, num_threads: int) -> None:
        """Compute with that many threads, the caller included; idle ones spin 50 us, then sleep.

        Results do not depend on it. No thread is tied to a CPU of its own, which was slower.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._lib.ps_set_threads(num_threads, _SPIN_US, 0)

    def supports(self, kind: Type) -> bool:
        """Whether weights of that type can be computed with on this machine."""
        return bool(self._lib.ps_supports(int(kind)))

    def advise_huge(self, address: int, num_bytes: int) -> None:
        """Ask for huge pages under a large buffer: page walks cost much when memory is read end to end."""
        if _allows_huge_pages():
            self._lib.ps_advise_huge(address, num_bytes)

    def pack(self, jobs: Sequence[PsPack]) -> None:
        """Pack weights, one after the other, in one call: meanwhile other threads have the interpreter."""
        self._lib.ps_pack((PsPack * len(jobs))(*jobs), len(jobs))

    def round(
        self, kind: Type, source: tuple[Type, int], shape: tuple[int, int, int, int], out: tuple[int, int]
    ) -> None:
        """Round a matrix: `source` is (type, address), `shape` (n, k, row stride, group), `out` (values,
        scale).
        """
        self._lib.ps_round(int(kind), int(source[0]), source[1], *shape, *out)

    def linear(self, job: PsLinear) -> None:
        """Run `ps_linear`; the structs' pointers must be alive and of the stated shapes."""
        self._call(self._lib.ps_linear, job)

    def rms_norm(self, job: PsNorm) -> None:
        """Run `ps_rms_norm`."""
        self._call(self._lib.ps_rms_norm, job)

    def silu_mul(self, job: PsSiluMul) -> None:
        """Run `ps_silu_mul`."""
        self._call(self._lib.ps_silu_mul, job)

    def rope_write(self, job: RopeWrite) -> None:
        """Run `ps_rope_write`."""
        self._call(self._lib.ps_rope_write, job)

    def attention(self, job: PsAttention) -> None:
        """Run `ps_attention`."""
        self._call(self._lib.ps_attention, job)

    def sample(self, job: PsSample) -> None:
        """Run `ps_sample`."""
        self._call(self._lib.ps_sample, job)

    def lookup(self, job: PsLookup) -> None:
        """Run `ps_lookup`."""
        self._call(self._lib.ps_lookup, job)

    def step(self, decoder: PsDecoder, step: PsStep) -> None:
        """Run `ps_step`.

        Raises:
            ValueError: a token, block or sample index outside of what the decoder has. Nothing was computed.
        """
        self._on_decoder(self._lib.ps_step, decoder, step)

    def draft(self, decoder: PsDecoder, job: PsDraft) -> None:
        """Run `ps_draft`; raises as `step`."""
        self._on_decoder(self._lib.ps_draft, decoder, job)

    @staticmethod
    def _on_decoder(function: Callable[..., int], decoder: PsDecoder, job: Structure) -> None:
        failed = function(byref(decoder), byref(job))
        if failed == _OUT_OF_BOUNDS:
            raise ValueError("a step's tables point outside of the model or its cache")
        if failed:
            raise MemoryError("the kernels could not get scratch memory")

    @staticmethod
    def _call(function: Callable[..., int], job: Structure) -> None:
        if function(byref(job)):
            raise MemoryError("the kernels could not get scratch memory")


@functools.cache
def _allows_huge_pages() -> bool:
    """Whether the operator does: the kernels' request would override a `never`."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return True  # Then the system says.


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise KernelsUnavailable(f"{path} was not built (python -m penstock.engine.native.build)")
    try:
        lib = ctypes.CDLL(str(path))
        lib.ps_abi_version.restype = c_int32
        version = lib.ps_abi_version()
        if version != ABI_VERSION:
            raise KernelsUnavailable(
                f"{path} has version {version}, this code wants {ABI_VERSION}: build it again"
            )
        _declare(lib)
    except (OSError, AttributeError) as why:
        raise KernelsUnavailable(f"{path} cannot be used, build it again: {why}") from why
    return lib


def _declare(lib: ctypes.CDLL) -> None:
    """Types of every function; an `AttributeError` means that the library lacks one."""
    lib.ps_struct_bytes.argtypes, lib.ps_struct_bytes.restype = [c_int32], c_int64
    for i, struct in enumerate(_STRUCTS):
        if lib.ps_struct_bytes(i) != sizeof(struct):
            raise AttributeError(f"its {struct.__name__} is another")
    lib.ps_init.argtypes, lib.ps_init.restype = [c_char_p], c_char_p
    lib.ps_set_threads.argtypes = [c_int32, c_int32, c_int32]
    lib.ps_pack.argtypes, lib.ps_pack.restype = [POINTER(PsPack), c_int64], None
    lib.ps_round.argtypes = [c_int32, c_int32, c_void_p, *[c_int64] * 4, c_void_p, c_void_p]
    lib.ps_round.restype = None
    lib.ps_advise_huge.argtypes, lib.ps_advise_huge.restype = [c_void_p, c_int64], None
    lib.ps_step.argtypes, lib.ps_step.restype = [POINTER(PsDecoder), POINTER(PsStep)], c_int32
    lib.ps_draft.argtypes, lib.ps_draft.restype = [POINTER(PsDecoder), POINTER(PsDraft)], c_int32
    for name, struct in _CALLS.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = [POINTER(struct)], c_int32
