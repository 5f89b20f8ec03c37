"""`penstock keys`, as it is typed."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.flags import duration
from penstock.cli.main import main
from penstock.gateway.identity.key_file import read_keys

KEY = re.compile(r"sk-[a-z2-7]{12}_[A-Za-z0-9_-]{43}")


class Typed:
    """Runs a command; `out` and `err` are what it wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str], path: Path) -> None:
        self._capsys, self.path = capsys, path
        self.out = self.err = ""

    def __call__(self, action: str, *argv: str, code: int = 0) -> str:
        assert main(["keys", action, "--file", str(self.path), *argv]) == code
        self.out, self.err = self._capsys.readouterr()
        return self.out

    def listed(self) -> list[dict[str, object]]:
        return json.loads(self("list", "--json"))


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Typed:
    return Typed(capsys, tmp_path / "keys.jsonl")


def test_a_scrapers_key_says_so(keys: Typed) -> None:
    keys("create", "--tenant", "monitoring", "--scrape")
    [record] = read_keys(keys.path)
    assert (record.scrape, record.admin) == (True, False)
    assert keys.listed()[0]["scrape"] is True
    keys("create", "--tenant", "monitoring", "--scrape", "--admin", code=2)
    assert "admin, scrape" in keys.err


def test_create_shows_the_key_once_and_stores_a_hash(keys: Typed) -> None:
    out = keys("create", "--tenant", "acme", "--tier", "pro", "--expires", "30d", "--label", "batch jobs")
    key = out.strip()
    assert KEY.fullmatch(key)
    assert "only time" in keys.err
    assert key not in keys.err
    stored = keys.path.read_text()
    assert key not in stored
    assert key.partition("_")[2] not in stored
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    [record] = read_keys(keys.path)
    assert (record.tenant, record.tier, record.label) == ("acme", "pro", "batch jobs")
    assert record.expires_s - record.created_s == 30 * 86_400
    text = keys("list")
    assert record.prefix in text
    assert "batch jobs" in text
    assert record.hash not in text
    assert key not in text


def test_json_is_for_machines(keys: Typed) -> None:
    made = json.loads(keys("create", "--tenant", "acme", "--json"))
    assert KEY.fullmatch(made["key"])
    assert (made["tenant"], made["state"], made["prefix"]) == ("acme", "active", made["key"][:15])
    [listed] = keys.listed()
    assert listed.keys() == made.keys() - {"key"}
    assert "hash" not in listed


def test_rotate_then_revoke(keys: Typed) -> None:
    old = keys("create", "--tenant", "acme", "--tier", "pro").strip()
    new = keys("rotate", old[:15], "--grace", "2h").strip()
    assert KEY.fullmatch(new)
    assert "ends 20" in keys.err
    first, second = keys.listed()
    assert (first["state"], second["state"]) == ("active", "active")
    assert (second["tenant"], second["tier"], second["replaces"]) == ("acme", "pro", old[3:15])
    assert first["expires_s"] == second["created_s"] + 7200
    assert second["expires_s"] == 0
    # A whole key will do as well: who found one somewhere need not cut it.
    keys("revoke", new)
    assert new not in keys.err
    assert [key["state"] for key in keys.listed()] == ["active", "revoked"]
    assert "revoked" in keys("list", "--tenant", "acme")
    assert old[:15] not in keys("list", "--tenant", "other")


def test_further_keys_are_of_the_tenants_tier(keys: Typed) -> None:
    keys("create", "--tenant", "acme", "--tier", "pro")
    keys("create", "--tenant", "acme")
    assert [key["tier"] for key in keys.listed()] == ["pro", "pro"]
    keys("create", "--tenant", "acme", "--tier", "free", code=2)
    assert len(keys.listed()) == 2


def test_a_configuration_names_the_file_and_the_tiers(keys: Typed, capsys, tmp_path: Path) -> None:
    config = tmp_path / "penstock.yaml"
    config.write_text(f"auth: {{keys_file: {keys.path}}}\ntenants: [{{id: acme, tier: pro}}]\n")
    assert main(["keys", "create", "-c", str(config), "--tenant", "acme"]) == 0
    assert main(["keys", "create", "-c", str(config), "--tenant", "x", "--tier", "gold"]) == 2
    assert "there is no tier 'gold'; there are enterprise, free, interactive, pro" in capsys.readouterr().err
    assert [key.tenant for key in read_keys(keys.path)] == ["acme"]


def test_the_state_directory_is_the_default(capsys) -> None:
    assert main(["keys", "create", "--tenant", "acme"]) == 0
    place = Path(os.environ["PENSTOCK_STATE_DIR"]) / "keys.jsonl"
    assert [key.tenant for key in read_keys(place)] == ["acme"]
    assert str(place) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["create", "--tenant", "two words"], "tenant: expected 1 to 128"),
        (["create", "--tenant", "key-1"], "begins with 'key-'"),
        (["create", "--tenant", "a", "--tier", "a b"], "tier: expected 1 to 64"),
        (["create", "--tenant", "a", "--label", "x\x1b[2J"], "label: expected"),
        (["create", "--tenant", "a", "--not-before", "2d", "--expires", "1d"], "never be accepted"),
        (["rotate", "sk-nosuchkey234"], "there is no such file"),
    ],
)
def test_wrong_words(keys: Typed, argv: list[str], words: str) -> None:
    keys(*argv, code=2)
    assert words in keys.err.replace("\n", " ")
    assert not keys.path.exists()


def test_what_cannot_be_rotated(keys: Typed) -> None:
    key = keys("create", "--tenant", "a").strip()
    keys("rotate", "sk-aaaaaaaaaaaa", code=2)
    assert "there is no key 'sk-aaaaaaaaaaaa'" in keys.err
    keys("revoke", key)
    keys("revoke", key)
    keys("rotate", key[:15], code=2)
    assert "is revoked; make a new key" in keys.err


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    command = [sys.executable, "-m", "penstock", "keys", "create", "--file", str(path), "--tenant"]
    running = [subprocess.Popen([*command, f"t{i}"], stdout=-1, stderr=-1) for i in range(4)]
    for process in running:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert sorted(key.tenant for key in read_keys(path)) == ["t0", "t1", "t2", "t3"]


def test_durations() -> None:
    assert [duration(text) for text in ("1s", "30m", "12h", "30d", "2w")] == [
        1,
        1800,
        43_200,
        2_592_000,
        1_209_600,
    ]
