"""Compiles every GPU kernel for compute capability 9.0, on any machine, and prints what became of each as
JSON.

With --all also the variants of attention that take ten seconds each.

A program of its own, since the tests' process defines kernels for Triton's interpreter. Needs no GPU and no
torch.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from penstock.engine.gpu.kernels import attention, layers, packed, prepare, sampler


@dataclass
class Kernel:
    """A kernel, the types of its run-time arguments in order, and its constants."""

    function: JITFunction[Any]
    types: list[str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    aligned: set[str] = field(default_factory=set[str])
    """Numbers that are multiples of 16 in every real model."""

    def compile(self) -> dict[str, int]:
        names = self.function.arg_names
        running = [name for name in names if name not in self.constants]
        signature = dict.fromkeys(names, "constexpr") | dict(zip(running, self.types, strict=True))
        attributes = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in running
            if signature[name].startswith("*") or name in self.aligned
        }
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(self.function, signature, constants, attributes)
        made = triton.compile(
            source,
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": self.warps, "num_stages": self.stages},
        )
        text = made.asm["ptx"]
        registers, stack = resources(made.asm["cubin"])
        return {
            "shared_bytes": made.metadata.shared,
            "wgmma": text.count("wgmma.mma_async"),
            "mma": text.count("mma.sync"),
            "async_copies": text.count("cp.async.cg"),
            "wide_loads": text.count("ld.global.v4.b32") + text.count("ld.global.L1::evict_first.v4.b32"),
            "registers": registers,
            "stack_bytes": stack,
        }


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack per thread), as the assembler assigned them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        reported = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", reported.stdout)
    assert found, reported.stdout
    return int(found[1]), int(found[2])


def attend(
    heads: int, kv_heads: int, dim: int, *, chunks: bool, window: bool = False, softcap: bool = False
) -> Kernel:
    """As `TritonOps.attend` launches it, in bfloat16."""
    group = heads // kv_heads
    rows = 128 if chunks else max(1 << (group - 1).bit_length(), 16)
    constants = {
        "NUM_HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim,
        "DIM": max(1 << (dim - 1).bit_length(), 16), "BLOCK_TOKENS": 16, "TILE": 64, "ROWS": rows,
        "ITEM_FIELDS": 8, "NUM_ITEMS": 3, "NUM_CHUNKS": 5, "CHUNKS": chunks, "SOFTCAP": softcap,
        "WINDOW": window,
    }  # fmt: skip
    types = ["*bf16"] * 3 + ["*i32"] * 3 + ["*fp32"] * 2 + ["i32", "fp32", "fp32", "i32", "i32", "i32"]
    stages = 2 if chunks or dim > 128 else 5
    return Kernel(attention.attend, types, constants, 8 if chunks else 4, stages, {"block_stride"})


def rotate(heads: int, kv_heads: int, dim: int, *, normed: bool) -> Kernel:
    """As `TritonOps.rotate_store` launches it."""
    constants = {
        "NUM_HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim, "DIM": dim, "ROTARY_DIM": dim,
        "BLOCK_TOKENS": 16, "HEADS": 8, "NORM": normed, "FLOAT8": False,
    }  # fmt: skip
    types = ["*bf16"] * 3 + ["*i64"] * 2 + ["*fp32"] * 2 + ["*bf16"] * 2 + ["i32", "fp32"]
    return Kernel(layers.rotate_store, types, constants, 4)


def product(*, bits: int, rows: int, splits: int = 1) -> Kernel:
    """As `TritonMatrixOps.multiply` launches it, in bfloat16."""
    four, many = bits == 4, rows > 64
    words = {4: "*i16", 8: "*i8", 0: "*fp8e4nv"}[bits]
    constants = {
        "GROUP": 128, "QUARTER": 32, "MIDDLE": 136.0, "FOUR": four, "SCALES": int(bits == 0),
        "OFFSET": int(four), "BIAS": False,
        "SPLITS": splits, "BLOCK_N": 128 if many else 64 if four else 32, "BLOCK_M": 64 if many else 16,
        "BF16": True, "FP16": False,
    }  # fmt: skip
    scales = ["*fp16", "*i8"] if four else ["*fp32", "*fp32"]
    types = ["*bf16", words, *scales, "*bf16", "*fp32" if splits > 1 else "*bf16", *["i32"] * 6]
    aligned = {"n", "k", "word_stride"}
    return Kernel(packed.matmul, types, constants, 8 if many else 4, 3 if many else 4, aligned)


def kernels() -> dict[str, Kernel]:
    """By name; shapes are those of Llama 3 8B, Qwen3 0.6B and 14B, and Gemma 2 9B."""
    made = {
        "attend 8b decode": attend(32, 8, 128, chunks=False),
        "attend 14b decode": attend(40, 8, 128, chunks=False),
        "attend 8b chunk": attend(32, 8, 128, chunks=True),
    }
    if "--all" in sys.argv:
        made["attend 0.6b decode"] = attend(16, 8, 128, chunks=False)
        made["attend phi decode"] = attend(32, 32, 96, chunks=False)
        made["attend llama 1b decode"] = attend(32, 8, 64, chunks=False)
        made["attend gemma decode"] = attend(16, 8, 256, chunks=False, window=True, softcap=True)
        made["attend 14b chunk"] = attend(40, 8, 128, chunks=True)
        made["attend gemma chunk"] = attend(16, 8, 256, chunks=True, window=True, softcap=True)
    made["rotate 8b"], made["rotate 14b"] = rotate(32, 8, 128, normed=False), rotate(40, 8, 128, normed=True)
    combined = {
        "NUM_HEADS": 32,
        "HEAD_DIM": 128,
        "DIM": 128,
        "SPLITS": 16,
        "COMBINE_FIELDS": 4,
        "NUM_COMBINES": 4,
    }
    made["combine 8b"] = Kernel(attention.combine, ["*bf16", "*i32", "*i32", "*fp32", "*fp32"], combined, 2)
    for add in (False, True):
        norms = ["*bf16"] * 4 + ["i32", "fp32"]
        made[f"norm add={add}"] = Kernel(layers.norm, norms, {"BLOCK": 4096, "ADD": add}, 8, aligned={"size"})
    for gelu in (False, True):
        gates = ["*bf16", "*bf16", "i32"]
        made[f"gate gelu={gelu}"] = Kernel(
            layers.gate_mul, gates, {"BLOCK": 1024, "GELU": gelu}, 4, aligned={"size"}
        )
    prepared = {"BLOCK": 128, "BLOCK_TOKENS": 16, "STEPS": 9, "NUM_TOKENS": 1, "NUM_SAMPLES": 2}
    types = (
        ["*i32"] * 5 + ["i32"] + ["*i32"] * 2 + ["i32"] * 4 + ["*i64"] * 3 + ["*i32", "*i64"] + ["*i32"] * 2
    )
    made["int4 few rows"] = product(bits=4, rows=1, splits=4)
    made["int4 many rows"] = product(bits=4, rows=128)
    made["int8 few rows"], made["fp8 few rows"] = product(bits=8, rows=1, splits=4), product(bits=0, rows=1)
    unpacked = {"GROUP": 128, "QUARTER": 32, "FOUR": True, "SCALES": 1, "OFFSET": 1, "ROWS": 64}
    made["int4 made dense"] = Kernel(
        packed.unpack, ["*i16", "*fp16", "*i8", "*bf16", "i32", "i32", "i32", "i32"], unpacked, 4,
        aligned={"n", "k", "word_stride"},
    )  # fmt: skip
    for whole in (True, False):
        made[f"round rows whole={whole}"] = Kernel(
            packed.round_rows, ["*bf16", "*fp8e4nv", "*fp32", "i32", "i32"],
            {"BLOCK": 1024 if whole else 128, "WHOLE": whole}, 4 if whole else 1, aligned={"k"},
        )  # fmt: skip
    made["prepare"] = Kernel(prepare.prepare, [*types, "i32", "i32"], prepared, 4)
    drawn = [
        "*fp32",
        "*i32",
        "*i32",
        "*fp32",
        "*i32",
        "*fp64",
        "*fp32",
        "*i64",
        "*i32",
        "*i32",
        "*i1",
        "*fp32",
        "*i32",
        "i32",
        "i32",
    ]
    sizes = {"GREEDY_BELOW": 1e-5, "CAPACITY": 8192, "BLOCK": 2048}
    made["sample"] = Kernel(sampler.sample, drawn, sizes, 16)
    return made


if __name__ == "__main__":
    json.dump({name: kernel.compile() for name, kernel in kernels().items()}, sys.stdout)
