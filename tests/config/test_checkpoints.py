"""What cannot be loaded is named for what it is, by `penstock serve` itself, before an engine starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config.checkpoints import resolve

MINI = resolve("penstock-demo-mini")


def adapter(place: Path) -> None:
    (place / "config.json").unlink()
    (place / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "meta-llama/Llama-3.1-8B"})
    )
    (place / "model.safetensors").rename(place / "adapter_model.safetensors")


def pickled(place: Path) -> None:
    (place / "model.safetensors").rename(place / "pytorch_model-00001-of-00001.bin")


def gguf_inside(place: Path) -> None:
    (place / "config.json").unlink()
    (place / "model.safetensors").rename(place / "qwen3-q4_k_m.gguf")


def gguf_beside_another(place: Path) -> None:
    """As of a repository whose safetensors file is a part, or of another model."""
    gguf_inside(place)
    (place / "vision.safetensors").write_bytes(b"")


def two_ggufs(place: Path) -> None:
    for name in ("qwen3-q4_k_m.gguf", "qwen3-q8_0.gguf", "mmproj-f16.gguf"):
        (place / name).write_bytes(b"GGUF\3\0\0\0")
    (place / "model.safetensors").unlink()


def metas_layout(place: Path) -> None:
    (place / "config.json").rename(place / "params.json")
    (place / "model.safetensors").rename(place / "consolidated.00.pth")


def no_weights(place: Path) -> None:
    (place / "model.safetensors").unlink()


def keras(place: Path) -> None:
    (place / "model.safetensors").rename(place / "tf_model.h5")


def quantized(method: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(
            json.dumps({**config, "quantization_config": {"quant_method": method}})
        )

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (adapter, ("is an adapter (LoRA) of meta-llama/Llama-3.1-8B", "merge_and_unload", "vLLM")),
        (pickled, ("pytorch_model-00001-of-00001.bin, a pickle", "save_pretrained")),
        (gguf_inside, ("qwen3-q4_k_m.gguf: is a file, but not GGUF",)),
        (gguf_beside_another, ("qwen3-q4_k_m.gguf: is a file, but not GGUF",)),
        (two_ggufs, ("holds 2 GGUF models: give one of them: qwen3-q4_k_m.gguf, qwen3-q8_0.gguf",)),
        (metas_layout, ("params.json", "config.json, *.safetensors")),
        (no_weights, ("has neither model.safetensors nor model.safetensors.index.json",)),
        (keras, ("tf_model.h5, of TensorFlow or Flax",)),
        (quantized("gptq"), ("(gptq): bits 'None' is not read", "--quantization int8 or int4", "vLLM")),
        (quantized("compressed-tensors"), ("config_groups must be an object",)),
        (quantized("bitsandbytes"), ("bitsandbytes is not read; expected one of gptq, awq",)),
        (quantized("something-new"), ("something-new is not read",)),
    ],
)
def test_it_is_named(
    change: Callable[[Path], None],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "model"
    shutil.copytree(MINI, place, copy_function=lambda source, target: Path(target).symlink_to(source))
    config = (place / "config.json").read_text()
    (place / "config.json").unlink()
    (place / "config.json").write_text(config)
    change(place)
    began: list[object] = []
    monkeypatch.setattr("penstock.fleet.launchers.process.Spares.begin", lambda *args: began.append(args))
    assert main(["serve", str(place), "--port", "0"]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        tuple(f"penstock: {place}{part}: " for part in ("", "/config.json", "/qwen3-q4_k_m.gguf"))
    )
    for word in words:
        assert word in line
    assert not began, "an engine was started for it"


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, said in (
        ("model.gguf", b"", "is a file, but not GGUF"),
        ("model.q4", b"GGUF\x03\0\0\0", "8 bytes are no GGUF file (truncated?)"),
        ("model-2.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 16, "tensors; expected at most 1048576"),
    ):
        (tmp_path / name).write_bytes(content)
        assert main(["serve", str(tmp_path / name)]) in (1, 2)
        assert f"penstock: {tmp_path / name}: " in (found := capsys.readouterr().err)
        assert said in found


def test_a_gguf_file_among_others_is_the_model(tmp_path: Path) -> None:
    """Beside a config.json, in parts, or a link in a hub's snapshot, whose name stays."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    for place in (blobs, snapshot):
        place.mkdir(parents=True)
    (blobs / "f00d").write_bytes(b"GGUF")
    (snapshot / "x-q8_0.gguf").symlink_to(blobs / "f00d")
    for other in ("config.json", "mmproj-x.gguf"):
        (snapshot / other).write_bytes(b"GGUF")
    assert resolve(str(snapshot)) == snapshot / "x-q8_0.gguf"
    assert resolve(str(snapshot / "x-q8_0.gguf")) == snapshot / "x-q8_0.gguf"
    (snapshot / "x-q8_0.gguf").unlink()
    for number in (1, 2, 3):
        (snapshot / f"y-0000{number}-of-00003.gguf").write_bytes(b"GGUF")
    assert resolve(str(snapshot)) == snapshot / "y-00001-of-00003.gguf"
    (snapshot / "model.safetensors").touch()
    (snapshot / "config.json").write_text("{}")
    assert resolve(str(snapshot)) == snapshot


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    from penstock.config.tree import EngineConfig, ModelConfig
    from penstock.models.registry import check_local_models

    shutil.copy(MINI / "config.json", tmp_path)
    check_local_models([ModelConfig(path=str(tmp_path), engine=EngineConfig(load_format="random"))])
    check_local_models(
        [ModelConfig(path=str(tmp_path), replicas=0)]
    )  # Its workers are elsewhere: only the tokenizer counts.
