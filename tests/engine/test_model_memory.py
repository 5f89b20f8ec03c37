"""What a model takes in memory is what the loader reserves for it, before it reads a weight."""

from pathlib import Path

import pytest
from engine_driver import tiny_runner

from penstock.config.engine_settings import EngineSettings
from penstock.engine.loader import load_weights
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.native.library import Type
from penstock.engine.runner import decoder_limits
from penstock.engine.step_model import choose_computing, reserved_bytes
from penstock.models.registry import read_spec, stored_quantization

MINI = Path(__file__).parents[2] / "models" / "penstock-demo-mini"
BOUND = 0.03
MAX_LEN = 512
SETTINGS: dict[str, object] = {"max_model_len": MAX_LEN, "max_running": 2}


@pytest.mark.parametrize(
    ("ending", "settings"),
    [
        ("", {"kernels": "torch", "dtype": "float32"}),
        ("", {"kernels": "native", "dtype": "float32"}),
        ("", {"kernels": "native", "dtype": "bfloat16"}),
        ("", {"kernels": "native", "dtype": "bfloat16", "quantization": "int8"}),
        ("", {"kernels": "native", "dtype": "bfloat16", "quantization": "int4"}),
        ("-int8", {"kernels": "native", "dtype": "bfloat16"}),
        ("-int4", {"kernels": "native", "dtype": "bfloat16"}),
    ],
)
def test_within_three_percent(ending: str, settings: dict[str, object]) -> None:
    check_within_three_percent(ending, settings)


def test_within_three_percent_where_bfloat16_is_multiplied_as_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    check_within_three_percent("", {"kernels": "torch", "dtype": "bfloat16"})


def check_within_three_percent(ending: str, settings: dict[str, object]) -> None:
    if settings["kernels"] == "native":
        try:
            native = NativeLibrary()
        except KernelsUnavailable as why:
            pytest.skip(str(why))
        if "int8" in (ending[1:], settings.get("quantization")) and not native.supports(Type.I8):
            pytest.skip(f"{native.isa} has no int8 dot products")
    directory = MINI.with_name(MINI.name + ending)
    spec, names = read_spec(directory)
    config = EngineSettings(**SETTINGS, **settings)
    computing, limits = choose_computing(config, spec), decoder_limits(config, MAX_LEN)
    weights = load_weights(
        directory, spec, names, computing.dtype, lambda _done, _total: None,
        quantization=stored_quantization(directory), kept_bits=computing.kept_bits,
    )  # fmt: skip
    reserved = reserved_bytes(spec, weights.num_bytes_left, computing, limits)
    runner = tiny_runner(directory, **SETTINGS, **settings)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in runner.weight_tensors()}
    reserved -= limits.max_samples * spec.vocab_size * 4  # A step's logits are no weights.
    if computing.native is None:  # Nor are torch's rotation tables and its logits before they are scaled.
        reserved -= MAX_LEN * spec.head_dim * 8
        reserved -= limits.max_samples * spec.vocab_size * computing.dtype.itemsize
    assert reserved == pytest.approx(sum(held.values()), rel=BOUND)
