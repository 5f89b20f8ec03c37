"""`penstock cache` over what was fetched from a hub on loopback."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub, loopback_hub

from penstock.cli.main import main
from penstock.config.checkpoints import resolve
from penstock.weight_cache import cache as cache_module


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    held: dict[Path, int] = {}
    monkeypatch.setattr(cache_module, "_PINS", held)
    with loopback_hub({"config.json": b"{}", "model.safetensors": b"w" * 5000}) as found:
        for name, value in {
            "HF_ENDPOINT": found.url, "HF_HOME": f"{tmp_path}/hf", "PENSTOCK_CACHE": f"{tmp_path}/cache",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield found
    for each in held.values():
        os.close(each)


@pytest.mark.usefixtures("hub")
def test_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr() == ("", f"{tmp_path}/cache: 0.0 GB\n")
    resolve("owner/name")
    capsys.readouterr()
    assert main(["cache"]) == 0
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["model", "version", "GB", "files", "used", "digest"]
    assert row[:5] == ["owner/name", "c0ffee000000", "0.00", "2", "now"]


def test_damage_and_removal(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    found = resolve("owner/name")
    assert main(["cache", "--verify"]) == 0
    (found / "model.safetensors").write_bytes(b"v" * 5000)
    assert main(["cache", "owner/name", "--verify"]) == 1
    assert "owner/name: model.safetensors: expected sha256 " in capsys.readouterr().out
    hub.asked.clear()
    assert resolve("owner/name") == found
    assert hub.asked == ["model.safetensors"]
    assert main(["cache", "owner/name", "--remove"]) == 1
    assert "owner/name: is in use" in capsys.readouterr().err
    pins = cache_module._PINS  # pyright: ignore[reportPrivateUsage]
    while pins:  # As if the process that used it had ended.
        os.close(pins.popitem()[1])
    assert main(["cache", "owner/name", "--remove"]) == 0
    assert not found.exists()
    assert main(["cache", "owner/name"]) == 1
    assert main(["cache", "--remove"]) == 2
