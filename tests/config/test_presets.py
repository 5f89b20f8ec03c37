import sys
from pathlib import Path
from types import ModuleType

import pytest

from penstock.config import checkpoints
from penstock.config.checkpoints import resolve, served_name
from penstock.config.tree import ModelConfig
from penstock.errors import CheckpointError, ConfigError


def model_dir(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_dir(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    for path in (str(directory), "my-model", "./my-model/", "../" + tmp_path.name + "/my-model"):
        assert resolve(path) == directory


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = model_dir(tmp_path / "m")
    assert resolve("~/m") == directory


def test_demo_models_are_in_the_package_or_beside_it_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "REPOSITORY", tmp_path)
    stranger = model_dir(tmp_path / "models" / "penstock-demo")  # Another package may be called `models`.
    packaged = model_dir(tmp_path / "penstock" / "demo_models" / "penstock-demo-mini")
    assert resolve("penstock-demo-mini") == packaged
    with pytest.raises(ConfigError, match=r"demo_models; name a model: penstock serve DIRECTORY$"):
        resolve("penstock-demo")
    (tmp_path / "pyproject.toml").touch()
    checkout = stranger
    assert resolve("penstock-demo") == checkout
    # A directory that happens to have the name does not hide it.
    model_dir(tmp_path / "cwd" / "penstock-demo")
    monkeypatch.chdir(tmp_path / "cwd")
    assert resolve("penstock-demo") == checkout
    assert resolve("./penstock-demo") == tmp_path / "cwd" / "penstock-demo"


def test_a_demo_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "REPOSITORY", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match=r"the demo model is not in .*models.*make train-demo"):
        resolve("penstock-demo")


def test_the_repository_is_this_one() -> None:
    assert (checkpoints.REPOSITORY / "penstock" / "config").is_dir()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("penstok-demo", "did you mean `penstock-demo`?"),
        ("./nowhere", "no such directory"),
        ("/nowhere/model", "no such directory"),
        ("../a/b", "no such directory"),
        ("what is this", "not a hub id"),
        ("a/b/c", "not a hub id"),
    ],
)
def test_no_such_model(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        resolve(path)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("path", ["~no-such-user-here/m", "x" * 5000, "a\0b"])
def test_paths_that_the_system_refuses(path: str) -> None:
    with pytest.raises(ConfigError):
        resolve(path)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file, but not GGUF; give that or the Hugging Face"):
        resolve(str(tmp_path / "model.safetensors"))


class Hub:
    """A stand-in for huggingface_hub: the real one would want a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: str | Exception) -> None:
        self.calls: list[tuple[str, str | None, list[str]]] = []
        errors = ModuleType("huggingface_hub.errors")
        errors.HfHubHTTPError = type("HfHubHTTPError", (Exception,), {})
        errors.HFValidationError = type("HFValidationError", (ValueError,), {})
        hub = ModuleType("huggingface_hub")

        def snapshot_download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            self.calls.append((repo, revision, allow_patterns))
            if isinstance(result, Exception):
                raise result
            return result

        hub.snapshot_download = snapshot_download
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)


def test_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, "/cache/qwen")
    assert resolve("Qwen/Qwen3-0.6B") == Path("/cache/qwen")
    assert resolve("Qwen/Qwen3-0.6B@refs/pr/1") == Path("/cache/qwen")
    assert [call[:2] for call in hub.calls] == [("Qwen/Qwen3-0.6B", None), ("Qwen/Qwen3-0.6B", "refs/pr/1")]
    assert "*.safetensors" in hub.calls[0][2]


def test_files_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, str(tmp_path))
    (tmp_path / "x-00001-of-00002.gguf").write_bytes(b"GGUF")
    name = "Qwen/Qwen3-GGUF/x-00001-of-00002.gguf"
    assert resolve(f"{name}@main") == tmp_path / "x-00001-of-00002.gguf"
    assert hub.calls == [("Qwen/Qwen3-GGUF", "main", ["x-*-of-00002.gguf"])]
    assert resolve("Qwen/Qwen3-GGUF") == tmp_path / "x-00001-of-00002.gguf"
    with pytest.raises(ConfigError, match=r"the hub's Qwen/Qwen3-GGUF has no file y\.gguf"):
        resolve("Qwen/Qwen3-GGUF/y.gguf")
    (tmp_path / "x-00001-of-00002.gguf").unlink()
    with pytest.raises(ConfigError, match=r"one of its GGUF files is Qwen/Qwen3-GGUF/NAME\.gguf"):
        resolve("Qwen/Qwen3-GGUF")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, OSError("no route to host\nmany more lines"))
    with pytest.raises(ConfigError, match=r"the hub does not give it: no route to host$"):
        resolve("Qwen/Qwen3-0.6B")


def test_without_the_hub_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"install `penstock\[hub\]`"):
        resolve("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig(path="penstock-demo"), "penstock-demo"),
        (ModelConfig(path="/models/llama/"), "llama"),
        (ModelConfig(path="Qwen/Qwen3-0.6B@main"), "Qwen3-0.6B"),
        (ModelConfig(path="Qwen/Qwen3-0.6B", name="small"), "small"),
        (ModelConfig(path="/models/Qwen3-0.6B-Q8_0.gguf"), "Qwen3-0.6B-Q8_0"),
        (ModelConfig(path="big-Q4_K_M-00001-of-00003.gguf"), "big-Q4_K_M"),
        (ModelConfig(path="Qwen/Qwen3-0.6B-GGUF/q8/Qwen3-Q8_0.gguf@main"), "Qwen3-Q8_0"),
    ],
)
def test_served_names(model: ModelConfig, name: str) -> None:
    assert served_name(model) == name


def test_the_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path / "my-model")
    assert served_name(ModelConfig(path=".")) == "my-model"
