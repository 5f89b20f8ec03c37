"""`penstock quantize`: its output loads and loses little, and interrupted work is taken up again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import distributions
from safetensors.torch import load_file
from tiny_models import save, tiny_model
from vector_models import decoder

from penstock.cli.main import main
from penstock.engine.quantize import publish
from penstock.engine.quantize.calibrate import awq_clips, awq_scales, gptq, nearest, relative_error
from penstock.engine.quantize.publish import TARGETS, Quantizer
from penstock.errors import CheckpointError, ConfigError
from penstock.models.registry import stored_pooling
from penstock.rng import stream

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MINI = Path(__file__).parents[2] / "models" / "penstock-demo-mini"
BOUNDS = {"gptq-int4": 0.12, "awq-int4": 0.12, "int8": 2e-3, "fp8": 2e-2}
"""Mean KL divergence in nats to the dense model at most; the weights are random, which is the hardest."""


def prompts(count: int = 6) -> list[list[int]]:
    random = stream(3, "calibration")
    return [[random.randrange(211) for _ in range(64)] for _ in range(count)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3", **SIZES, num_hidden_layers=2), tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_answers_like_the_dense_model(target: str, dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    seen: list[tuple[int, int]] = []
    errors = Quantizer(dense, output, target, prompts()).run(lambda *step: seen.append(step))
    assert len(errors) == 14
    assert all(0 < each.error < 0.2 for each in errors)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    found = distributions(output, dtype="float32", kernels="torch")
    right = distributions(dense, dtype="float32", kernels="torch")
    assert 0 < (right.exp() * (right - found)).sum(1).mean() < BOUNDS[target]


@pytest.mark.parametrize(
    ("family", "target"),
    [("gemma2", "awq-int4"), ("phi3", "awq-int4"), ("mixtral", "gptq-int4"), ("mixtral", "awq-int4")],
)
def test_families_that_store_their_layers_otherwise(family: str, target: str, tmp_path: Path) -> None:
    """Norms that add one, fused tensors, experts."""
    changes: dict[str, object] = SIZES | {"num_hidden_layers": 1}
    if family == "phi3":
        changes |= {"head_dim": None, "pad_token_id": 0}
    if family == "mixtral":
        changes |= {"num_local_experts": 2}
    source = save(tiny_model(family, **changes), tmp_path / "dense")
    if (family, target) == ("mixtral", "awq-int4"):
        with pytest.raises(ConfigError, match="take gptq-int4"):
            Quantizer(source, tmp_path / "out", target, prompts())
        return
    Quantizer(source, tmp_path / "out", target, prompts()).run(lambda _done, _total: None)
    found = distributions(tmp_path / "out", dtype="float32", kernels="torch")
    right = distributions(source, dtype="float32", kernels="torch")
    assert 0 < (right.exp() * (right - found)).sum(1).mean() < 0.2


def test_a_model_that_would_lose_a_part_is_refused(tmp_path: Path) -> None:
    source = save(tiny_model("gemma3_whole", **SIZES, num_hidden_layers=1), tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"parts beside its decoder .*vision"):
        Quantizer(source, tmp_path / "out", "int8", prompts())
    assert not (tmp_path / "out").exists()


def test_gptq_and_awq_lose_less_than_rounding_does() -> None:
    """On inputs of which some are large and some go together."""
    torch.manual_seed(5)
    x = torch.randn(512, 128) @ (torch.eye(128) + 0.3 * torch.randn(128, 128))
    x[:, ::16] *= 8
    weight, gram = torch.randn(64, 128), x.t() @ x
    plain = relative_error(weight, nearest(weight, 32).dense(), gram)
    assert relative_error(weight, gptq(weight, gram, 32).dense(), gram) < 0.8 * plain
    factor = awq_scales(weight, gram, x.abs().mean(0), 32)
    scaled = nearest(weight * factor, 32).dense() / factor
    assert relative_error(weight, scaled, gram) < 0.9 * plain
    # Few far values: what is clipped of them is less than what the others gain.
    weight[::3, ::40] *= 6
    weight, gram = weight * factor, gram / (factor[:, None] * factor)
    clipped = nearest(weight, 32, awq_clips(weight, gram, 32)).dense()
    assert relative_error(weight, clipped, gram) < relative_error(weight, nearest(weight, 32).dense(), gram)


@pytest.mark.parametrize(
    ("gram_bytes", "first"), [(1, "model-layers-0000-0000.safetensors"), (1 << 30, "layer-0000.safetensors")]
)
def test_interrupted_work_is_taken_up_again(
    gram_bytes: int, first: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether layers are calibrated one at a time or together."""
    monkeypatch.setattr(publish, "GRAM_BYTES_MAX", gram_bytes)
    whole, output = tmp_path / "whole", tmp_path / "out"
    Quantizer(dense, whole, "gptq-int4", prompts()).run(lambda _done, _total: None)
    rounded, layer_class = list[int](), publish._Layer  # pyright: ignore[reportPrivateUsage]

    def layer(quantizer: Quantizer, number: int, inputs: Any) -> object:
        rounded.append(number)
        return layer_class(quantizer, number, inputs)

    monkeypatch.setattr(publish, "_Layer", layer)

    def interrupt(_done: int, _total: int) -> None:
        if (output / first).is_file():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantizer(dense, output, "gptq-int4", prompts()).run(interrupt)
    assert rounded == [0]
    assert not (output / "config.json").exists(), "an unfinished directory is no model"
    with pytest.raises(ConfigError, match="another model, format or text"):
        Quantizer(dense, output, "awq-int4", prompts())
    (output / "layer-0007.safetensors").write_bytes(b"")  # Was joined, and not removed.
    errors = Quantizer(dense, output, "gptq-int4", prompts()).run(lambda _done, _total: None)
    assert len(errors) == 14
    assert rounded == [0, 1], "each once"
    assert {path.name for path in output.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, load_file(output / path.name)[name]), name
    with pytest.raises(CheckpointError, match="is quantized already"):
        Quantizer(output, tmp_path / "again", "int8", prompts())
    with pytest.raises(ConfigError, match="is not empty"):
        Quantizer(dense, output, "int8", prompts())


def test_a_layer_that_was_not_whole_on_the_disk_is_rounded_again(dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    torn = output / "layer-0000.safetensors"

    def interrupt(_done: int, _total: int) -> None:
        if torn.is_file():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantizer(dense, output, "int8", prompts()).run(interrupt)
    torn.write_bytes(torn.read_bytes()[:1000])
    assert len(Quantizer(dense, output, "int8", prompts()).run(lambda _done, _total: None)) == 14
    assert not torn.exists()


def test_a_source_that_cannot_be_read_is_named(dense: Path, tmp_path: Path) -> None:
    source = shutil.copytree(dense, tmp_path / "source")
    lost = source / "merges.txt"
    copy = publish.shutil.copyfile

    def copyfile(path: Path, to: Path) -> Path:
        if path == lost:
            raise PermissionError(13, "Permission denied", str(path))
        return copy(path, to)

    lost.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish.shutil, "copyfile", copyfile)
        with pytest.raises(ConfigError, match=r"source/merges\.txt: cannot be read: Permission denied"):
            Quantizer(source, tmp_path / "out", "int8", prompts()).run(lambda _done, _total: None)


def test_a_place_that_cannot_be_written_is_named(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"{file}: is a file"):
        Quantizer(dense, file, "int8", prompts())
    with pytest.raises(ConfigError, match="file/out: cannot be written: Not a directory"):
        Quantizer(dense, file / "out", "int8", prompts())
    output, save_file = tmp_path / "out", publish.save_file

    def full(_tensors: object, _path: Path, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "save_file", full)
    with pytest.raises(
        ConfigError, match="out: cannot be written: No space left on device; the same command"
    ):
        Quantizer(dense, output, "int8", prompts()).run(lambda _done, _total: None)
    assert not (output / "config.json").exists()
    monkeypatch.setattr(publish, "save_file", save_file)
    Quantizer(dense, output, "int8", prompts()).run(lambda _done, _total: None)
    assert (output / "config.json").is_file()


def test_a_model_of_vectors_keeps_its_pooling(tmp_path: Path) -> None:
    decoder("qwen3", tmp_path / "dense", "mean", **SIZES, num_hidden_layers=1)
    Quantizer(tmp_path / "dense", tmp_path / "out", "int8", prompts()).run(lambda _done, _total: None)
    kept = stored_pooling(tmp_path / "out")
    assert kept is not None
    assert kept == stored_pooling(tmp_path / "dense")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("What is the capital of France? " * 200)
    output = tmp_path / "mini"
    assert (
        main(
            [
                "quantize",
                str(MINI),
                "--to",
                "int8",
                "--text",
                str(text),
                "--tokens",
                "512",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert f"penstock serve {output}" in said
    assert (
        json.loads((output / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    )
    assert (output / "tokenizer.json").is_file()
    assert main(["quantize", str(MINI), "--to", "int8", "--text", str(tmp_path / "none")]) == 2
    assert "--text" in capsys.readouterr().err
