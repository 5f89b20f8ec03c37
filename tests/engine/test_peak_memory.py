"""No step after start-up raises peak memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from penstock.engine.native import Kernels, KernelsUnavailable

DOUBLES = Path(__file__).parents[1] / "doubles"
VOCAB_SIZE = 50_000
ALLOWED_KIB = 12 * 1024
"""For Python's own objects. The logits of one step alone are 16 MB here."""


@pytest.fixture(scope="module", params=["dense", "experts"])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if request.param == "dense":
        config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    else:
        # Wide enough inside that the scratch of an expert that everybody chooses would show.
        sizes |= {"intermediate_size": 4096, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = MixtralConfig(**sizes, architectures=["MixtralForCausalLM"])
    config.save_pretrained(path)
    return path


def test_the_worst_traffic_takes_no_more_than_start_up(shape: Path) -> None:
    """With the native kernels: torch makes tensors anew in every step. Large ones go straight back to the system here, so
    that the peak is of what is used at once and not of what the allocator keeps."""
    try:
        Kernels()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    ended = subprocess.run(
        [sys.executable, str(DOUBLES / "peak_memory.py"), str(shape), "native"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": f"{os.getcwd()}:{DOUBLES}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    before, after = map(int, ended.stdout.split())
    assert after - before <= ALLOWED_KIB, f"{before} KiB after start-up, {after} KiB after the traffic"
