"""No step after start-up raises peak memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from penstock.engine.native import KernelsUnavailable, NativeLibrary

pytestmark = pytest.mark.timeout(300)
DOUBLES = Path(__file__).parents[1] / "doubles"
VOCAB_SIZE = 50_000
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
HOST_TIER = {
    "host_kv_memory_bytes": 4 * 1024 * 1024,
    "host_kv_idle_s": 0.0,
    "kv_memory_bytes": 2 * 1024 * 1024,  # 256 blocks: sixteen rows at their longest would take 350.
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("dense", "moe")}
    LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(paths["dense"])
    # Wide experts: what they work in is the larger part of a step.
    moe = SHAPE | {"hidden_size": 512, "vocab_size": 5_000, "intermediate_size": 2048, "num_local_experts": 4}
    MixtralConfig(**moe, architectures=["MixtralForCausalLM"]).save_pretrained(paths["moe"])
    return paths


@pytest.mark.parametrize(
    ("shape", "settings", "allowed_mib"),
    [
        # For Python's own objects. The logits of one step alone are 16 MB here.
        ("dense", {"kernels": "native"} | HOST_TIER, 10),
        # With torch's kernels 21 and 13 MB more were seen, and not explained.
        ("dense", {"kernels": "torch", "overlap": "on"} | HOST_TIER, 28),
        ("moe", {"kernels": "torch", "host_kv_memory_bytes": 0}, 18),
        ("moe", {"kernels": "native", "host_kv_memory_bytes": 0}, 12),
    ],
    ids=["native, host tier", "torch, overlap and host tier", "experts, torch", "experts, native"],
)
def test_the_worst_traffic_takes_no_more_than_start_up(
    shapes: dict[str, Path], shape: str, settings: dict[str, object], allowed_mib: int
) -> None:
    """In the configuration of a worker: its allocator's settings, both kinds of kernels, one more thread for
    overlap.
    """
    if settings["kernels"] == "native":
        try:
            NativeLibrary()
        except KernelsUnavailable as why:
            pytest.skip(str(why))
    ended = subprocess.run(
        [sys.executable, str(DOUBLES / "peak_memory.py"), str(shapes[shape]), json.dumps(settings)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.getcwd()}:{DOUBLES}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    before, after = map(int, ended.stdout.split())
    assert after - before <= allowed_mib * 1024, f"{before} KiB after start-up, {after} KiB after the traffic"
