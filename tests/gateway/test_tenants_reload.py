"""Settings and keys that change while the server runs: streams go on, wrong files are refused."""

import asyncio
import http.client
import json
import os

import pytest
from tenant_keys import add, ask

from penstock.config.tenancy import TenantConfig, TierConfig
from penstock.gateway.identity.api_keys import edit_keys, revoke


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch) -> None:
    monkeypatch.setattr("penstock.gateway.identity.tenancy.KEYS_FILE_CHECK_S", 0.1)


class Streaming:
    """A stream in the middle of its answer."""

    def __init__(self, running, key) -> None:
        self._connection = http.client.HTTPConnection(running.host, running.port, timeout=20)
        messages = [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": "tiny", "stream": True, "max_tokens": 60, "messages": messages})
        self._connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        assert self._response.readline().startswith(b"data: ")

    def finish(self) -> None:
        """Read it to its end."""
        text = self._response.read()
        self._connection.close()
        assert text.endswith(b"data: [DONE]\n\n")
        assert b"error" not in text


def reload(running, config) -> bool:
    return asyncio.run_coroutine_threadsafe(running.gateway.tenancy.reload(config), running.loop).result(10)


def wait_logged(running, words: str, times: int = 1) -> None:
    running.wait_until(lambda: running.log_text.getvalue().count(words) >= times)


def with_file(kit, path, **auth):
    auth = {"keys_file": str(path), "keys": (), **auth}
    return kit.replace(kit.make_config(), auth=auth)


def test_a_changed_keys_file_is_followed(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    old = add(path)
    running = start(with_file(kit, path), step_s=0.02)
    stream = Streaming(running, old.key)
    fresh = add(path, tenant="fresh")
    wait_logged(running, "changed keys file is in force")
    assert ask(running, fresh.key)[0] == 200
    edit_keys(path, lambda keys: ([revoke(key, 1) if key.id == old.record.id else key for key in keys], None))
    wait_logged(running, "changed keys file is in force", 2)
    status, body = ask(running, old.key)
    assert (status, body["error"]["code"]) == (401, "revoked_api_key")
    # Revoked in the middle of an answer: that one ends as it began.
    stream.finish()


def test_a_wrong_keys_file_changes_nothing(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    issued = add(path)
    running = start(with_file(kit, path))
    good = path.read_bytes()
    path.write_bytes(good + b"{half a line")
    wait_logged(running, "the changed keys file was not taken")
    assert ":2:" in running.log_text.getvalue()
    assert ask(running, issued.key)[0] == 200
    path.unlink()
    wait_logged(running, "the changed keys file was not taken", 2)
    assert ask(running, issued.key)[0] == 200
    path.write_bytes(good)
    wait_logged(running, "changed keys file is in force")
    assert ask(running, issued.key)[0] == 200


GONE = "keys are gone from the file"


def test_an_emptied_keys_file_revokes_nobody(start, kit, tmp_path) -> None:
    """As after a copy that has just begun, or a full disk."""
    path = tmp_path / "keys"
    issued = [add(path, tenant=f"t{i}") for i in range(10)]
    config = with_file(kit, path)
    running = start(config)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"")
    wait_logged(running, f"10 of 10 {GONE}")
    path.write_bytes(b"".join(lines[:4]))
    wait_logged(running, f"6 of 10 {GONE}")
    assert [ask(running, each.key)[0] for each in issued] == [200] * 10
    assert not reload(running, config), "SIGHUP takes no such file either"
    assert ask(running, issued[9].key)[0] == 200
    path.write_bytes(b"".join(lines[:5]))  # Half of them: somebody cleaned up.
    wait_logged(running, "changed keys file is in force")
    assert [ask(running, each.key)[0] for each in issued] == [200] * 5 + [401] * 5


def test_many_keys_can_be_revoked_at_once_by_saying_so(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    issued = [add(path, tenant=f"t{i}") for i in range(10)]
    config = with_file(kit, path)
    running = start(config)
    edit_keys(path, lambda keys: ([*(revoke(key, 1) for key in keys[1:]), keys[0]], None))
    wait_logged(running, "changed keys file is in force")
    assert [ask(running, each.key)[0] for each in issued] == [200] + [401] * 9
    path.write_bytes(b"")
    wait_logged(running, f"1 of 1 {GONE}")
    assert ask(running, issued[0].key)[0] == 200
    assert not reload(running, config)
    assert ask(start(config), issued[0].key)[0] == 401, "a server that starts takes the file as it is"


def test_a_change_of_the_same_size_and_time_is_seen(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    first, second = add(path), add(tmp_path / "second")
    info = path.stat()
    running = start(with_file(kit, path))
    (tmp_path / "second").replace(path)
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))
    assert path.stat().st_size == info.st_size
    wait_logged(running, "changed keys file is in force")
    assert (ask(running, first.key)[0], ask(running, second.key)[0]) == (401, 200)


def test_reloading_the_configuration(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    key = add(path, tier="free").key
    running = start(with_file(kit, path), step_s=0.02)
    received = []
    running.call(lambda: running.gateway.tenancy.on_reload.append(received.append))
    stream = Streaming(running, key)
    config = running.config
    strict = kit.replace(config, server={"port": 1234}, limits={"n_max": 3})
    strict = type(config)(**{
        **{name: getattr(strict, name) for name in strict.__struct_fields__},
        "tiers": (TierConfig(name="free", models=("other",)),),
    })  # fmt: skip
    assert reload(running, strict)
    assert ask(running, key)[0] == 403
    [reported] = received
    assert reported.tiers == strict.tiers
    assert reported.server == config.server
    log = running.log_text.getvalue()
    assert 'these changes need a restart sections="server, limits"' in log
    assert reload(running, config)
    assert ask(running, key)[0] == 200
    stream.finish()
    assert len({request.cache_salt for request in running.requests}) == 1


def test_a_configuration_that_cannot_be_is_refused(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    key = add(path, tier="pro").key
    running = start(with_file(kit, path))
    received = []
    running.call(lambda: running.gateway.tenancy.on_reload.append(received.append))

    def changed(**fields):
        names = running.config.__struct_fields__
        return type(running.config)(**{**{name: getattr(running.config, name) for name in names}, **fields})

    wrong = [
        (changed(tiers=(TierConfig(name="free"),)), "there is no tier 'pro'; there are free"),
        (changed(tenants=(TenantConfig(id="a", tier="gold"),)), "tenants[0].tier: there is no tier 'gold'"),
        (with_file(kit, tmp_path / "none"), "auth.keys_file: there is no"),
        (kit.replace(running.config, auth={"keys_file": ""}), "auth: it names no caller"),
    ]
    for config, words in wrong:
        assert not reload(running, config)
        assert words in running.log_text.getvalue()
        assert ask(running, key)[0] == 200
    assert received == []


def test_a_subscriber_that_fails_keeps_nobody_from_hearing(start, kit) -> None:
    running = start(kit.make_config())
    received = []

    def fails(config) -> None:
        raise RuntimeError("not today")

    running.call(lambda: running.gateway.tenancy.on_reload.extend([fails, received.append]))
    assert reload(running, running.config)
    assert len(received) == 1
    assert "not today" in running.log_text.getvalue()
    assert ask(running, kit.KEY)[0] == 200
