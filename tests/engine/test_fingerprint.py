"""What is in a checkpoint decides its digests, and what it is called does not."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.engine_settings import EngineSettings
from penstock.engine.fingerprint import SAMPLES_MAX, fingerprint, identify
from penstock.errors import CheckpointError

TENSORS = {f"layers.{i}.weight": torch.arange(8192.0) + i for i in range(6)} | {"bias": torch.ones(3)}
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 7}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards, and all that belongs to them."""
    directory = tmp_path / "model"
    directory.mkdir()
    names = sorted(TENSORS)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, directory / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


def change_weight(path: Path, name: str, place: int) -> None:
    tensors = load_file(path)
    tensors[name][place] += 1
    save_file(tensors, path)


def test_a_directory_that_was_copied_moved_or_linked_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    before = fingerprint(checkpoint)
    copy = tmp_path / "another name"
    shutil.copytree(checkpoint, copy)
    (copy / "model-2.safetensors").touch()
    assert fingerprint(copy) == before
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    assert fingerprint(snapshot) == before
    assert fingerprint(checkpoint.rename(tmp_path / "moved")) == before


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_one_weight_of_any_tensor_counts_where_a_page_is_taken(checkpoint: Path, name: str) -> None:
    before = fingerprint(checkpoint)
    file = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"][name]
    change_weight(checkpoint / file, name, len(TENSORS[name]) // 2)
    after = fingerprint(checkpoint)
    assert after.checkpoint != before.checkpoint
    assert after.tokenizer == before.tokenizer


@pytest.mark.parametrize("num_kinds", [2, 3, 7])
def test_of_more_tensors_than_pages_are_taken_some_of_every_kind_count(
    tmp_path: Path, num_kinds: int
) -> None:
    """Layers repeat their kinds in one order, and the pages that are taken must not fall into step with
    it.
    """

    def write(trained: int) -> str:
        kinds = range(num_kinds)
        tensors = {
            f"{i:04}.{kind}": torch.full((2,), float(kind == trained))
            for i in range(SAMPLES_MAX)
            for kind in kinds
        }
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        return fingerprint(tmp_path).checkpoint

    assert len({write(kind) for kind in range(-1, num_kinds)}) == num_kinds + 1


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"rope_theta": 1.0}, True),
        ({"_name_or_path": "acme/model"}, False),
        ({"transformers_version": "5"}, False),
    ],
)
def test_the_configuration_counts_but_not_where_it_came_from(
    checkpoint: Path, change: dict[str, object], counts: bool
) -> None:
    before = fingerprint(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(change | CONFIG, indent=4))
    assert (fingerprint(checkpoint).checkpoint != before.checkpoint) is counts


def test_the_tokenizer_has_a_digest_of_its_own(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    (checkpoint / "README.md").write_text("not part of it")
    assert fingerprint(checkpoint) == before
    (checkpoint / "tokenizer.json").write_text('{"version": "1.1"}')
    after = fingerprint(checkpoint)
    assert after.checkpoint == before.checkpoint
    assert after.tokenizer != before.tokenizer


def test_made_up_weights_are_those_of_their_seed(checkpoint: Path) -> None:
    real, first, second = (fingerprint(checkpoint, random_seed=seed) for seed in (None, 1, 2))
    assert len({real, first, second}) == 3
    for path in checkpoint.glob("*.safetensors*"):
        path.unlink()
    assert fingerprint(checkpoint, random_seed=1) == first


def test_what_a_worker_computes_depends_on_how_it_is_configured(checkpoint: Path) -> None:
    def of(dtype: str = "bfloat16", kernels: str = "native avx2", **settings: object) -> str:
        return identify(checkpoint, EngineSettings(**settings), dtype=dtype, kernels=kernels)  # type: ignore[arg-type]

    assert of() == of(threads=3, max_running=7, prefix_cache=False), "how much at once is no part of it"
    others = [of(dtype="float32"), of(quantization="int8"), of(quantization="int4"), of(kernels="torch 2")]
    assert len({of(), *others}) == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a whole safetensors file"),
        (b"\xff" * 16, "no safetensors file has"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not one"),
        ((200).to_bytes(8, "little") + b"{}", "not a whole safetensors file"),
        (b'\x26\x00\x00\x00\x00\x00\x00\x00{"w": {"data_offsets": [0, 99999999]}}', ("bytes that the file "
        "does not have")),
        (b'\x20\x00\x00\x00\x00\x00\x00\x00{"w": {"data_offsets": [-9, 4]}}', ("bytes that the file does not "
        "have")),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(checkpoint: Path, content: bytes, says: str) -> None:
    (checkpoint / "model-2.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model-2\.safetensors: .*{says}"):
        fingerprint(checkpoint)


def test_the_digests_of_a_checkpoint_are_those_of_earlier_releases(checkpoint: Path) -> None:
    """A stream moves only between workers of one identity, so its derivation changes only on purpose, and the
    CHANGELOG says so.
    """
    assert [digest[:16] for digest in fingerprint(checkpoint)] == ["12699a6dcc45f40a", "51fdb22bb46762f9"]


def test_a_checkpoint_of_more_files_than_threads_is_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    """And no file stays open, whether it is read to its end or one of them is broken."""
    files = [f"model-{number:02}.safetensors" for number in range(21)]
    for number, file in enumerate(files):
        save_file({f"w{number}": torch.full((4,), float(number))}, tmp_path / file)
    index = {"weight_map": {f"w{number}": file for number, file in enumerate(files)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    expected = hashlib.sha256(b"{}")
    parts = [(tmp_path / file).read_bytes() for file in files]
    sizes = [int.from_bytes(data[:8], "little") for data in parts]
    for data, size in zip(parts, sizes, strict=True):
        expected.update(data[: 8 + size])
    for data, size in zip(parts, sizes, strict=True):
        expected.update(data[8 + size :])
    before = set(os.listdir("/proc/self/fd"))
    assert fingerprint(tmp_path).checkpoint == expected.hexdigest()
    (tmp_path / files[17]).write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=files[17]):
        fingerprint(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: cannot be read: No such file"):
        fingerprint(checkpoint)
