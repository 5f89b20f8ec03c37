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


def gguf_beside_a_config(place: Path) -> None:
    (place / "model.safetensors").rename(place / "qwen3-q4_k_m.gguf")


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
        (gguf_inside, ("qwen3-q4_k_m.gguf is GGUF", "--quantization int8")),
        (gguf_beside_a_config, ("qwen3-q4_k_m.gguf is GGUF", "*.safetensors")),
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
    assert line.startswith((f"penstock: {place}: ", f"penstock: {place}/config.json: "))
    for word in words:
        assert word in line
    assert not began, "an engine was started for it"


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("model.gguf", b""), ("model.q4", b"GGUF\x03\0\0\0")):
        (tmp_path / name).write_bytes(content)
        assert main(["serve", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert "is GGUF, llama.cpp's format" in said
        assert "--quantization int8 or int4" in said


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    from penstock.config.tree import EngineConfig, ModelConfig
    from penstock.models.loadable import check_local_models

    shutil.copy(MINI / "config.json", tmp_path)
    check_local_models([ModelConfig(path=str(tmp_path), engine=EngineConfig(load_format="random"))])
    check_local_models(
        [ModelConfig(path=str(tmp_path), replicas=0)]
    )  # Its workers are elsewhere: only the tokenizer counts.
