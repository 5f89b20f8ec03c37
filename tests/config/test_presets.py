from pathlib import Path

import pytest
from loopback_hub import LoopbackHub, loopback_hub

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


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback_hub({"config.json": b"{}", "model.safetensors": b"w", "model.bin": b"p"}) as hub:
        use(monkeypatch, hub, tmp_path)
        found = resolve("owner/name")
        assert {path.name for path in found.glob("*.*")} == {".penstock", "config.json", "model.safetensors"}
        assert resolve(f"owner/name@{hub.commit}") != found
        with pytest.raises(ConfigError, match=r"the hub does not give it: HTTP 404 .*set HF_TOKEN"):
            resolve("owner/name@refs/pr/1")
        assert hub.keys[-1][0] == "/api/models/owner/name/revision/refs/pr/1"


def test_files_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"x-00001-of-00002.gguf": b"GGUF", "x-00002-of-00002.gguf": b"GGUF2", "big.safetensors": b"0"}
    with loopback_hub(files) as hub:
        use(monkeypatch, hub, tmp_path)
        found = resolve("owner/name/x-00001-of-00002.gguf@main")
        assert found.name == "x-00001-of-00002.gguf"
        assert sorted(hub.asked) == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], "all parts, no more"
        with pytest.raises(ConfigError, match=r"the hub's owner/name has no file y\.gguf"):
            resolve("owner/name/y.gguf")
        with pytest.raises(ConfigError, match=r"one of its GGUF files is owner/name/NAME\.gguf"):
            resolve("owner/name")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback_hub({"config.json": b"{}"}) as hub:
        use(monkeypatch, hub, tmp_path)
        found = resolve("owner/name")
    assert resolve("owner/name") == found, "what was fetched before"
    with pytest.raises(ConfigError, match=r"the hub does not give it: 127\.0\.0\.1:\d+: "):
        resolve("owner/other")


def use(monkeypatch: pytest.MonkeyPatch, hub: LoopbackHub, home: Path) -> None:
    for name, value in (("HF_ENDPOINT", hub.url), ("HF_HOME", f"{home}/hf"), ("PENSTOCK_CACHE", f"{home}/c")):
        monkeypatch.setenv(name, value)


def test_bounds_of_the_cache_that_make_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback_hub({"config.json": b"{}" * 600}) as hub:
        use(monkeypatch, hub, tmp_path)
        for text in ("much", "0", "-1GiB"):
            monkeypatch.setenv("PENSTOCK_CACHE_BYTES", text)
            with pytest.raises(ConfigError, match=r"PENSTOCK_CACHE_BYTES: .* is no size such as 200GiB"):
                resolve("owner/name")
        monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1KiB")
        with pytest.raises(
            ConfigError, match=r"owner/name: has 1200 bytes; the weight cache in .* have 1024"
        ):
            resolve("owner/name")
        monkeypatch.setenv("PENSTOCK_CACHE_BYTES", "1.5 GB")
        assert resolve("owner/name").is_dir()


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
