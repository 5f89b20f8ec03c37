"""The weight cache before a hub on loopback: what is fetched once, resumed, checked, and what goes first."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub, loopback_hub

from penstock.errors import CheckpointError, ConfigError
from penstock.weight_cache import cache as cache_module
from penstock.weight_cache.cache import WeightCache
from penstock.weight_cache.hub import HubSource
from penstock.weight_cache.source import Listing, RemoteFile, SourceError, SourceUnreachable, check_listing

WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b"{}", "tokenizer.json": b"[1]", "model.safetensors": WEIGHTS,
    "part/extra.json": b"{}", "README.md": b"not wanted", "pytorch_model.bin": b"never",
    "consolidated.safetensors": b"the same again",
}  # fmt: skip
WANTED = ("*.json", "*.safetensors", "!consolidated*")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with loopback_hub(FILES) as found:
        yield found


@pytest.fixture(autouse=True)
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Path, int]]:
    """What this process holds, until the test ends."""
    held: dict[Path, int] = {}
    monkeypatch.setattr(cache_module, "_PINS", held)
    yield held
    for each in held.values():
        os.close(each)


def environ(hub: LoopbackHub, home: Path, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), **more}


def source(hub: LoopbackHub, home: Path, patterns: Sequence[str] = WANTED, **more: str) -> HubSource:
    return HubSource("owner/name", None, patterns, environ(hub, home, **more))


def release(pins: dict[Path, int]) -> None:
    """As if the process that used the models had ended."""
    while pins:
        os.close(pins.popitem()[1])


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_model_is_fetched_once(hub: LoopbackHub, tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    cache = WeightCache(tmp_path / "cache", tell=lambda *each: reported.append(each))
    found = cache.fetch(source(hub, tmp_path))
    wanted = ("config.json", "tokenizer.json", "model.safetensors", "part/extra.json")
    total = sum(len(FILES[name]) for name in wanted)
    assert names(found) - {".penstock/model.json"} == {
        "config.json", "tokenizer.json", "model.safetensors", "part/extra.json",
    }  # fmt: skip
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert reported[-1] == ("fetching owner/name", total, total)
    assert [done for _, done, _ in reported] == sorted(done for _, done, _ in reported)
    count = len(hub.asked)
    assert count == 4
    assert cache.fetch(source(hub, tmp_path)) == found
    assert len(hub.asked) == count, "nothing came twice"


def test_a_new_commit_is_another_model_and_an_unreachable_hub_the_last_one(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    cache = WeightCache(tmp_path / "cache")
    first = cache.fetch(source(hub, tmp_path))
    hub.commit = "beef" + "1" * 36
    hub.files["config.json"] = b'{"a": 1}'
    second = cache.fetch(source(hub, tmp_path))
    assert second != first
    assert (first / "config.json").read_bytes() == b"{}"
    assert cache.fetch(source(hub, tmp_path, HF_HUB_OFFLINE="1")) == second
    away = HubSource(
        "owner/name", None, WANTED, {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    )
    assert cache.fetch(away) == second
    other = HubSource(
        "owner/other", None, WANTED, {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    )
    with pytest.raises(SourceUnreachable, match=r"127\.0\.0\.1:9: "):
        cache.fetch(other)


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_a_connection_that_breaks_goes_on_where_it_was(
    hub: LoopbackHub, tmp_path: Path, takes_ranges: bool
) -> None:
    hub.takes_ranges = takes_ranges
    hub.breaks_after["model.safetensors"] = 300_000
    found = WeightCache(tmp_path / "cache", pause_s=0.0).fetch(source(hub, tmp_path))
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    asked = [each for each in hub.asked if each.startswith("model")]
    assert asked == ["model.safetensors", "model.safetensors bytes=300000-"]


def test_another_process_goes_on_with_what_a_killed_one_left(
    hub: LoopbackHub, tmp_path: Path, pins: dict[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "CHUNK_BYTES", 1 << 16)

    def tell(_what: str, done: int, _total: int) -> None:
        if done > 500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WeightCache(tmp_path / "cache", tell=tell).fetch(source(hub, tmp_path))
    release(pins)
    hub.asked.clear()
    found = WeightCache(tmp_path / "cache").fetch(source(hub, tmp_path))
    again, extra = hub.asked
    assert int(again.removeprefix("model.safetensors bytes=").rstrip("-")) > 400_000
    assert extra == "part/extra.json", "the small files before it were there"
    assert (found / "model.safetensors").read_bytes() == WEIGHTS


def test_a_source_that_brings_nothing_is_given_up(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "ATTEMPTS", 3)
    src = source(hub, tmp_path)
    src.listing()
    hub.fails = 3
    with pytest.raises(SourceUnreachable, match=r"config\.json: HTTP 503"):
        WeightCache(tmp_path / "cache", pause_s=0.0).fetch(src)


def test_what_is_not_what_the_hub_says_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        hub.asked.clear()
        hub.lies = {name: b"x" * len(FILES[name])}
        with pytest.raises(
            CheckpointError, match=rf"owner/name: {name}: expected \S+ [0-9a-f]+, got .*twice"
        ):
            WeightCache(tmp_path / name, pause_s=0.0).fetch(source(hub, tmp_path))
        assert hub.asked.count(name) == 2
    hub.lies = {"model.safetensors": b"x" * len(WEIGHTS)}

    def tell(_what: str, done: int, _total: int) -> None:
        if done > 1_000_000:
            hub.lies = {}

    cache = WeightCache(tmp_path / "again", tell=tell)
    assert (cache.fetch(source(hub, tmp_path)) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_busy_hub_is_asked_again(hub: LoopbackHub, tmp_path: Path) -> None:
    src = source(hub, tmp_path)
    src.listing()
    hub.fails = 2
    assert WeightCache(tmp_path / "cache", pause_s=0.0).fetch(src).is_dir()


def test_keys_go_to_the_hub_and_to_nobody_else(tmp_path: Path) -> None:
    with loopback_hub(FILES, token="secret") as hub:
        with pytest.raises(SourceError, match=r"HTTP 401 .*private or gated, set HF_TOKEN"):
            WeightCache(tmp_path).fetch(source(hub, tmp_path))
        hub.keys.clear()
        assert WeightCache(tmp_path).fetch(source(hub, tmp_path, HF_TOKEN="secret")).is_dir()
        assert {key for path, key in hub.keys if path.startswith("/cdn/")} == {""}
        assert {key for path, key in hub.keys if not path.startswith("/cdn/")} == {"Bearer secret"}
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "token").write_text("secret\n")
        assert WeightCache(tmp_path / "b").fetch(source(hub, tmp_path)).is_dir()


def test_no_such_repository(hub: LoopbackHub, tmp_path: Path) -> None:
    missing = HubSource("owner/nothing", "v1", WANTED, environ(hub, tmp_path))
    with pytest.raises(SourceError, match=r"HTTP 404 .*no such repository or revision"):
        WeightCache(tmp_path).fetch(missing)


def test_one_download_at_a_time(hub: LoopbackHub, tmp_path: Path) -> None:
    """Two that want the same model: one fetches it, the other one waits and has it."""
    hub.held.clear()
    reported: list[str] = []
    waits = threading.Event()

    def tell(what: str, _done: int, _total: int) -> None:
        reported.append(what)
        if "another download runs" in what:
            waits.set()

    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                WeightCache(tmp_path / "cache", tell=tell).fetch(source(hub, tmp_path))
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert waits.wait(20)
    hub.held.set()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len(hub.asked) == 4, "each file came once"


class Given:
    """A source of one file of zeros."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self._size = name, size

    def listing(self) -> Listing:
        return Listing("v1", (RemoteFile("model.safetensors", self._size, None),))

    def open(self, file: RemoteFile, offset: int):
        import contextlib
        import io

        return contextlib.nullcontext((io.BytesIO(bytes(file.size - offset)), offset))


def here(cache: WeightCache) -> list[str]:
    return [entry.model.name for entry in cache.entries() if entry.model is not None]


def use(
    cache: WeightCache, name: str, size: int, at_s: int, pins: dict[Path, int], *, keep: bool = False
) -> None:
    """Fetch a model at a time of its own, and end."""
    directory = cache.fetch(Given(name, size))
    lock = directory.parents[1] / "locks" / directory.name
    os.utime(lock, (at_s, at_s))
    if not keep:
        os.close(pins.pop(directory))


def test_the_least_recently_used_goes_first_and_what_is_in_use_stays(
    tmp_path: Path, pins: dict[Path, int]
) -> None:
    cache = WeightCache(tmp_path, bytes_max=10_000)
    use(cache, "a", 3000, 1, pins, keep=True)
    use(cache, "b", 3000, 2, pins)
    use(cache, "c", 2000, 3, pins)
    use(cache, "b", 3000, 4, pins)
    use(cache, "d", 3000, 5, pins)
    assert here(cache) == ["a", "b", "d"], "c was not used for the longest time but a, which is in use"
    use(cache, "e", 6000, 6, pins)
    assert here(cache) == ["a", "e"]
    with pytest.raises(ConfigError, match=r"big: has 10001 bytes; the weight cache in .* may have 10000"):
        cache.fetch(Given("big", 10_001))
    use(cache, "e", 6000, 7, pins, keep=True)
    with pytest.raises(ConfigError, match=r"f: has 5000 bytes to fetch; .* in use, and may have 10000"):
        cache.fetch(Given("f", 5000))
    assert here(cache) == ["a", "e"]


def test_a_disk_without_room(tmp_path: Path, pins: dict[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10**9]
    monkeypatch.setattr(
        cache_module.shutil, "disk_usage", lambda _place: cache_module.shutil._ntuple_diskusage(0, 0, free[0])
    )
    cache = WeightCache(tmp_path)
    use(cache, "a", 1000, 1, pins)
    free[0] = cache_module.SPARE_BYTES + 999
    with pytest.raises(ConfigError, match=r"b: has 1000 bytes to fetch; .* its disk has \d+ free"):
        cache.fetch(Given("b", 1000))
    assert here(cache) == [], "what nobody uses gave way"


def test_a_model_that_another_process_uses_is_not_deleted(tmp_path: Path, pins: dict[Path, int]) -> None:
    cache = WeightCache(tmp_path)
    directory = cache.fetch(Given("a", 1000))
    release(pins)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from test_cache import Given, WeightCache\n"
        "WeightCache(Path(sys.argv[2])).fetch(Given('a', 1000))\n"
        "print('has it', flush=True); sys.stdin.read()"
    )
    path = os.pathsep.join(each for each in sys.path if each)
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"has it\n"
    (entry,) = cache.entries()
    assert entry.is_used
    assert not cache.remove(entry)
    child.kill()
    child.communicate()
    (entry,) = cache.entries()
    assert not entry.is_used
    assert cache.remove(entry)
    assert not directory.exists()


def test_damage_on_the_disk_is_found_and_only_that_file_comes_again(hub: LoopbackHub, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    found = cache.fetch(source(hub, tmp_path))
    (entry,) = cache.entries()
    assert cache.verify(entry) == []
    (found / "model.safetensors").write_bytes(b"\1" + WEIGHTS[1:])
    hub.asked.clear()
    (wrong,) = cache.verify(entry)
    assert wrong.startswith("model.safetensors: expected sha256 ")
    assert cache.fetch(source(hub, tmp_path)) == found
    assert hub.asked == ["model.safetensors"]
    (found / "config.json").write_bytes(b"{} longer")
    assert cache.fetch(source(hub, tmp_path)) == found
    assert hub.asked == ["model.safetensors", "config.json"]
    assert (found / "config.json").read_bytes() == b"{}"


def test_the_digest_that_was_asked_for(hub: LoopbackHub, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    cache.fetch(source(hub, tmp_path))
    (entry,) = cache.entries()
    assert entry.model is not None
    cache.fetch(source(hub, tmp_path), entry.model.digest)
    with pytest.raises(
        CheckpointError, match=rf"owner/name: expected the digest 00, got {entry.model.digest}"
    ):
        cache.fetch(source(hub, tmp_path), "00")


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a/../../x.json", "..\\x.json", "", ".penstock/x", "a\0b"]
)
def test_names_that_lead_out(name: str) -> None:
    with pytest.raises(CheckpointError, match="is no name below the model"):
        check_listing("owner/name", (RemoteFile(name, 1, None),))


def test_a_directory_that_cannot_be_written(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"owner/name: the weight cache in .*file: .*Not a directory"):
        WeightCache(tmp_path / "file").fetch(source(hub, tmp_path))


def test_what_huggingface_hub_has_fetched_is_used_where_it_lies(hub: LoopbackHub, tmp_path: Path) -> None:
    """Their own client, from the same server: so the server here answers as the real one does."""
    theirs = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    directory = theirs.snapshot_download(
        "owner/name", endpoint=hub.url, cache_dir=tmp_path / "hf" / "hub", allow_patterns=list(WANTED)
    )
    src = source(hub, tmp_path)
    assert src.found_elsewhere(src.listing()) == Path(directory)
    assert src.found_elsewhere(None) == Path(directory)
    (Path(directory) / "config.json").unlink()
    assert src.found_elsewhere(src.listing()) is None
