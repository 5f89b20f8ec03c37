"""Models from object storage: a real S3 server (moto), through `resolve`, as `penstock serve` does it."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.checkpoints import resolve, served_name
from penstock.config.tree import ModelConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.weight_cache import cache as cache_module
from penstock.weight_cache.cache import WeightCache
from penstock.weight_cache.s3 import S3Source

WEIGHTS = bytes(range(256)) * 100
PATTERNS = ("*.json", "*.safetensors", "*.gguf")


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[Any, dict[str, str]]]:
    """A client, and what the environment says of the server."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    client = boto3.client(
        "s3", endpoint_url=environ["AWS_ENDPOINT_URL"], region_name="us-east-1",
        aws_access_key_id="test", aws_secret_access_key="test",
    )  # fmt: skip
    client.create_bucket(Bucket="models")
    for name, data in {"config.json": b"{}", "model.safetensors": WEIGHTS, "train.log": b"no"}.items():
        client.put_object(Bucket="models", Key=f"qwen/{name}", Body=data)
    client.put_object(Bucket="models", Key="qwen-other/config.json", Body=b"[]")
    client.put_object(Bucket="models", Key="gguf/small.Q8_0.gguf", Body=b"GGUF\3\0\0\0")
    yield client, environ
    client.close()
    server.stop()


@pytest.fixture
def client(
    store: tuple[Any, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    held: dict[Path, int] = {}
    monkeypatch.setattr(cache_module, "_PINS", held)
    for name, value in (store[1] | {"PENSTOCK_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    yield store[0]
    for each in held.values():
        os.close(each)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


@pytest.mark.usefixtures("client")
def test_a_prefix_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = resolve("s3://models/qwen")
    assert files(found) == {"config.json", "model.safetensors"}
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert "fetching s3://models/qwen: 0 of 0 MB" in capsys.readouterr().err
    assert resolve("s3://models/qwen/") == found
    assert served_name(ModelConfig(path="s3://models/qwen#digest=00")) == "qwen"


@pytest.mark.usefixtures("client")
def test_one_gguf_object_and_a_prefix_with_one() -> None:
    assert resolve("s3://models/gguf/small.Q8_0.gguf").name == "small.Q8_0.gguf"
    assert resolve("s3://models/gguf").name == "small.Q8_0.gguf"
    assert served_name(ModelConfig(path="s3://models/gguf/small.Q8_0.gguf")) == "small.Q8_0"


def test_a_changed_object_is_another_version_and_an_unreachable_store_the_last_one(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_object(Bucket="models", Key="changing/config.json", Body=b"{}")
    first = resolve("s3://models/changing")
    client.put_object(Bucket="models", Key="changing/config.json", Body=b"{ }")
    second = resolve("s3://models/changing")
    assert [(each / "config.json").read_bytes() for each in (first, second)] == [b"{}", b"{ }"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert resolve("s3://models/changing") == second
    with pytest.raises(ConfigError, match=r"s3://models/qwen: cannot be read: .*Could not connect"):
        resolve("s3://models/qwen")


def test_digests(client: Any, tmp_path: Path) -> None:
    """An object's MD5 from its ETag, its SHA-256 where it was put with one; and `#digest=` over all files."""
    client.put_object(Bucket="models", Key="sums/config.json", Body=b"{}", ChecksumAlgorithm="SHA256")
    client.put_object(Bucket="models", Key="sums/model.safetensors", Body=WEIGHTS)
    config, weights = S3Source("s3://models/sums", PATTERNS).listing().files
    assert config.digest is not None
    assert weights.digest is not None
    assert (config.digest.algorithm, config.digest.hex) == ("sha256", hashlib.sha256(b"{}").hexdigest())
    assert (weights.digest.algorithm, weights.digest.hex) == ("md5", hashlib.md5(WEIGHTS).hexdigest())
    resolve("s3://models/sums")
    (entry,) = WeightCache(tmp_path / "cache").entries()
    assert entry.model is not None
    assert resolve(f"s3://models/sums#digest={entry.model.digest}") == entry.directory
    with pytest.raises(CheckpointError, match=f"expected the digest 00ff, got {entry.model.digest}"):
        resolve("s3://models/sums#digest=00FF")
    with pytest.raises(ConfigError, match=r"expected #digest=HEX behind it, got #main"):
        resolve("s3://models/sums#main")


def test_what_came_is_kept_and_the_rest_asked_for(client: Any, tmp_path: Path) -> None:
    source = S3Source("s3://models/qwen", PATTERNS)
    file = next(each for each in source.listing().files if each.name == "model.safetensors")
    with source.open(file, 20_000) as (stream, begins):
        assert (begins, stream.read()) == (20_000, WEIGHTS[20_000:])


@pytest.mark.usefixtures("client")
def test_what_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"s3://models/nothing: cannot be read: there is no object of a model"
    ):
        resolve("s3://models/nothing")
    with pytest.raises(ConfigError, match=r"s3://nobody/x: cannot be read: .*NoSuchBucket"):
        resolve("s3://nobody/x")
