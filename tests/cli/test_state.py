"""What is kept between runs."""

import os
import stat
from pathlib import Path

from penstock.cli.wiring.state import with_secret
from penstock.config.machine import state_directory
from penstock.config.tenancy import AuthConfig
from penstock.config.tree import Config


def test_the_secret_is_made_once_and_for_us_alone() -> None:
    first = with_secret(Config()).auth.secret
    assert len(first) >= 40
    assert with_secret(Config()).auth.secret == first
    [path] = state_directory().iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    configured = Config(auth=AuthConfig(secret="s" * 20))
    assert with_secret(configured) == configured


def test_a_secret_that_others_may_read_is_not_used() -> None:
    first = with_secret(Config()).auth.secret
    [path] = state_directory().iterdir()
    path.chmod(0o644)
    assert with_secret(Config()).auth.secret != first
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert with_secret(Config()).auth.secret not in ("", first, Path("/etc/hostname").read_text().strip())


def test_no_place_to_keep_it_is_no_reason_not_to_serve(monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_STATE_DIR", "/dev/null/nowhere")
    secrets = {with_secret(Config()).auth.secret for _ in range(2)}
    assert len(secrets) == 2


def test_where_the_state_is(monkeypatch) -> None:
    assert state_directory() == Path(os.environ["PENSTOCK_STATE_DIR"])
    monkeypatch.delenv("PENSTOCK_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert state_directory() == Path("/var/state/penstock")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_directory() == Path.home() / ".local/state/penstock"
