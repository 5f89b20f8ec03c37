"""The compared variants: each engine in each of its precisions, and how its server is started with its best
settings.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import OUT
from bench.process import Process, ask

PEERS = OUT / "peers"
VLLM = PEERS / "vllm" / "bin"
LLAMA_CPP = {"": PEERS / "llama.cpp" / "bin", "avx2": PEERS / "llama.cpp-avx2" / "bin"}
"""By the instruction set that it was built for; "": this processor's best."""
LOWERED = {
    "": {},
    "avx2": {
        "PENSTOCK_NATIVE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
    },
}  # fmt: skip
"""Environment in which our engine and torch's libraries compute with no more than that."""
CONTEXT = 2048
STREAMS_MAX = 32
KV_GIB = 1
INSTALL = {"vllm": "bench/peers/install_vllm.sh", "llama.cpp": "bench/peers/install_llama_cpp.sh"}


@dataclass(frozen=True)
class Variant:
    """An engine in one precision.

    `precision` is how it is asked for: a dtype, `quantization` or file type.
    """

    engine: str
    precision: str
    isa: str = ""
    """The instruction set that it is held to, of those in `LOWERED`."""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision}"

    @property
    def asked_as(self) -> str:
        """On the command line."""
        return f"{self.engine}:{self.precision}"


VARIANTS = (
    Variant("ours", "bf16"),
    Variant("ours", "torch"),
    Variant("ours", "int8"),
    Variant("ours", "int4"),
    Variant("vllm", "bf16"),
    Variant("llama.cpp", "bf16"),
    Variant("llama.cpp", "f16"),
    Variant("llama.cpp", "q8_0"),
    Variant("llama.cpp", "q4_0"),
)
"""In the order of the tables. torch is bfloat16 without our compiled kernels. f16 is llama.cpp's faster
16-bit type on processors without bfloat16 instructions."""


@dataclass(frozen=True)
class Launch:
    """A server's command line and what it adds to the environment."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
    """The files that must be on disk before, and their text."""


def missing(variant: Variant) -> str:
    """Why this variant cannot run here, or an empty string."""
    if variant.engine == "ours":
        return ""
    if variant.engine == "vllm" and variant.isa:
        return "it has no lower instruction set"
    program = {"vllm": VLLM / "vllm", "llama.cpp": LLAMA_CPP[variant.isa] / "llama-server"}[variant.engine]
    installed = program.exists() and any(program.parents[1].glob(".installed-*"))
    command = f"{INSTALL[variant.engine]} {variant.isa}".strip()
    return "" if installed else f"not installed: run {command} (make bench-engine does)"


def launch(variant: Variant, model: Path, port: int) -> Launch:
    """How to serve the model directory `model` on a port of the loopback interface."""
    starters = {"ours": _ours, "vllm": _vllm, "llama.cpp": _llama_cpp}
    return starters[variant.engine](variant, model, port)


def versions(variants: list[Variant]) -> dict[str, str]:
    """The version that each engine reports of itself."""
    found: dict[str, str] = {}
    for engine, isa in dict.fromkeys((variant.engine, variant.isa) for variant in variants):
        if engine == "vllm":
            code = "from importlib.metadata import version; print(version('vllm'), 'torch', version('torch'))"
            found[engine] = _output([str(VLLM / "python"), "-c", code])
        elif engine == "llama.cpp":
            programs = LLAMA_CPP[isa]
            package = next(programs.parent.glob(".installed-*")).name.removeprefix(".installed-")
            commit = (programs / "commit").read_text().strip()
            found[engine] = f"llama-cpp-python {package}'s sources, {commit} {isa}".strip()
    return found


def _ours(variant: Variant, model: Path, port: int) -> Launch:
    precision = variant.precision
    config = OUT / f"engine-bench-{model.name}-{precision}.yaml"
    flags = ("serve", "-c", str(config), "--port", str(port), "--no-auth", "--log-level", "warning")
    text = json.dumps(_our_config(precision, model))
    state = {"PENSTOCK_STATE_DIR": str((OUT / "state").absolute())}  # Its ledger is not the user's.
    environment = state | LOWERED[variant.isa]
    return Launch((sys.executable, "-m", "penstock", *flags), environment, files={config: text})


def our_settings(precision: str) -> dict[str, object]:
    """The `engine` branch of our configuration."""
    engine: dict[str, object] = {
        "dtype": "bfloat16", "max_model_len": CONTEXT, "max_running": STREAMS_MAX,
        "kv_memory_bytes": KV_GIB * 1024**3,
    }  # fmt: skip
    more = {"bf16": {}, "torch": {"kernels": "torch"}}.get(precision, {"quantization": precision})
    return engine | more


def _our_config(precision: str, model: Path) -> dict[str, object]:
    """Without promises: with the default ones our server refuses late callers, and no peer does that."""
    models = [{"path": str(model), "name": model.name, "engine": our_settings(precision)}]
    return {"models": models, "admission": {"ttft_target_ms": 0, "tpot_target_ms": 0}}


def _vllm(variant: Variant, model: Path, port: int) -> Launch:
    dtype = {"bf16": "bfloat16"}[variant.precision]
    flags = ("--dtype", dtype, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(STREAMS_MAX))
    served = ("--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port))
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{VLLM}:{os.environ.get('PATH', '')}",
    }
    return Launch((str(VLLM / "vllm"), "serve", str(model), *flags, *served), environment)


def _llama_cpp(variant: Variant, model: Path, port: int) -> Launch:
    threads = str(len(os.sched_getaffinity(0)))
    file = gguf_path(model, variant.precision)
    # Every stream has its own part of the context; no copies of prompts in main memory: no prompt comes
    # again.
    slots = ("--parallel", str(STREAMS_MAX), "--ctx-size", str(CONTEXT * STREAMS_MAX), "--cache-ram", "0")
    flags = ("--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--jinja", *slots)
    served = ("--alias", model.name, "--host", "127.0.0.1", "--port", str(port), "--offline")
    return Launch((str(LLAMA_CPP[variant.isa] / "llama-server"), "--model", str(file), *flags, *served))


def gguf_path(model: Path, precision: str) -> Path:
    """Where llama.cpp's file of a model directory lives."""
    return model.parent / "gguf" / f"{model.name}-{precision}.gguf"


def make_gguf(model: Path, variant: Variant) -> None:
    """Convert to bfloat16 with llama.cpp's own writer (its converter refuses tokenizers that it has not met),
    and from there with its quantizer; kept for the next run.

    Raises:
        subprocess.CalledProcessError: the quantizer failed.
    """
    from gguf_files import convert

    base, target = gguf_path(model, "bf16"), gguf_path(model, variant.precision)
    base.parent.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        whole = convert(model, base.with_suffix(".partial"), recipe="gguf-bf16", pre="gpt-2")
        whole.rename(base)
    if not target.exists():
        partial = target.with_suffix(".partial")
        quantize = str(LLAMA_CPP[variant.isa] / "llama-quantize")
        command = [quantize, str(base), str(partial), variant.precision.upper()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        partial.rename(target)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def serving(launch: Launch, model: str, port: int, log: Path) -> Iterator[tuple[Process, float]]:
    """The server inside the block, and the seconds from its start to its first answered request.

    Raises:
        RuntimeError: it ended before its first answer, or had none in time.
    """
    for path, text in launch.files.items():
        path.write_text(text, encoding="utf-8")
    log.unlink(missing_ok=True)
    # A health page may answer before the first token is possible.
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    # Everybody keeps compiled modules, as an installed server does.
    with Process(*launch.command, log=log, PYTHONDONTWRITEBYTECODE="", **launch.environment) as process:
        yield process, process.wait(lambda: ask(port, "/v1/chat/completions", body)[0] == 200)
