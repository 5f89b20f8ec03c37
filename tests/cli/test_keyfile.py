import os
from pathlib import Path

import pytest

from penstock.cli.wiring.state import forget_key, load_key, save_key


def test_a_key_is_found_by_port_until_it_is_forgotten() -> None:
    save_key("127.0.0.1", 8000, "sk-one")
    save_key("127.0.0.1", 8001, "sk-two")
    assert load_key("127.0.0.1", 8000) == "sk-one"
    assert load_key("localhost", 8001) == "sk-two"
    forget_key("127.0.0.1", 8000)
    assert load_key("127.0.0.1", 8000) == ""


def test_two_servers_of_one_port_have_a_key_each() -> None:
    save_key("127.0.0.1", 8000, "sk-one")
    save_key("::1", 8000, "sk-two")
    save_key("127.0.0.2", 8000, "sk-three")
    forget_key("127.0.0.2", 8000)
    found = [load_key(host, 8000) for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.2")]
    assert found == ["sk-one", "sk-one", "sk-two", "sk-two", ""]
    forget_key("127.0.0.1", 8000)
    assert load_key("localhost", 8000) == "sk-two"


def test_a_key_never_goes_to_another_machine() -> None:
    save_key("127.0.0.1", 8000, "sk-one")
    assert load_key("192.0.2.1", 8000) == load_key("localhost.example.com", 8000) == ""


def test_only_the_owner_may_read_it() -> None:
    save_key("127.0.0.1", 8000, "sk-one")
    directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "penstock"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "key-127.0.0.1-8000").stat().st_mode & 0o777 == 0o600


def test_somebody_elses_directory_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"penstock-{os.getuid()}"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    save_key("127.0.0.1", 8000, "sk-one")
    assert list(directory.iterdir()) == []
    (directory / "key-127.0.0.1-8000").write_text("planted")
    assert load_key("127.0.0.1", 8000) == ""


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    save_key("127.0.0.1", 8000, "sk-one")
    path = Path(os.environ["XDG_RUNTIME_DIR"]) / "penstock" / "key-127.0.0.1-8000"
    target = tmp_path / "target"
    target.write_text("mine")
    path.unlink()
    path.symlink_to(target)
    save_key("127.0.0.1", 8000, "sk-two")
    assert (target.read_text(), path.is_symlink()) == ("mine", False)


def test_without_a_place_it_is_just_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    save_key("127.0.0.1", 8000, "sk-one")
    assert load_key("127.0.0.1", 8000) == ""
    forget_key("127.0.0.1", 8000)
