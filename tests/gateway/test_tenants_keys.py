"""Stored keys: the file, every life that a key can have, and keys through a real socket."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from tenant_keys import NOW_S, add, ask

from penstock.config.tenancy import TenantConfig
from penstock.errors import ConfigError, Unauthenticated
from penstock.gateway.identity import api_keys
from penstock.gateway.identity.api_keys import ApiKey, Issued, edit_keys, read_keys, stamp
from penstock.gateway.identity.tenants import StoredKeys, Tenants


def stored(path: Path, *tenants: TenantConfig) -> StoredKeys:
    return StoredKeys(read_keys(path), Tenants(tenants, (), secret=b"s"))


def test_a_key_is_found_by_its_prefix_and_held_to_its_secret(tmp_path) -> None:
    path = tmp_path / "keys"
    first, other = add(path), add(path, tenant="other")
    keys = stored(path)
    assert len(keys) == 2
    caller = keys.find(first.key.encode(), NOW_S)
    assert caller is not None
    assert (caller.tenant.id, caller.key_prefix) == ("acme", first.record.prefix)
    swapped = first.key[:16] + other.key[16:]
    for wrong in (
        swapped,
        first.key[:-1],
        first.key + "A",
        first.record.prefix,
        "",
        "sk-",
        first.record.hash,
        "é" * 59,
    ):
        assert keys.find(wrong.encode(), NOW_S) is None
    assert keys.find(b"\xff" * 59, NOW_S) is None


def test_when_a_key_is_accepted(tmp_path) -> None:
    path = tmp_path / "keys"
    key = add(path, not_before_s=NOW_S + 10, expires_s=NOW_S + 20).key.encode()
    keys = stored(path)
    for now_s, code in ((NOW_S + 9, "early_api_key"), (NOW_S + 20, "expired_api_key")):
        with pytest.raises(Unauthenticated) as refused:
            keys.find(key, now_s)
        assert refused.value.code == code
    assert keys.find(key, NOW_S + 10) is not None
    assert keys.find(key, NOW_S + 19) is not None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "keys:2: Input data was truncated"),
        ("[]", "keys:2: Expected `object`, got `array`"),
        ('{"id": "a"}', "keys:2: Object missing required field `hash`"),
        ('{"surprise": 1}', "keys:2: Object contains unknown field `surprise`"),
        ("\xff", "keys:2: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words) -> None:
    path = tmp_path / "keys"
    add(path)
    with path.open("ab") as file:
        file.write(line.encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"keys:2: ") as refused:
        read_keys(path)
    assert words in str(refused.value)
    with pytest.raises(ConfigError):
        add(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"id": "short"}, {"hash": "00"}, {"tenant": "key-1"}, {"tenant": ""}, {"tier": "a b"}, {"created_s": -1},
    {"label": "\n"}],
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(tmp_path, change) -> None:
    path = tmp_path / "keys"
    issued = add(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(issued.record, **change)))
    with pytest.raises(ConfigError, match=r"keys:1: "):
        read_keys(path)


def test_bounds_of_the_file(tmp_path) -> None:
    path = tmp_path / "keys"
    record = add(path).record
    with pytest.raises(ConfigError, match="over the bound of 1 keys"):
        edit_keys(path, lambda keys: ((*keys, api_keys.issue(1, tenant="b").record), None), keys_max=1)
    path.write_bytes(msgspec.json.encode(record) + b"\n" + msgspec.json.encode(record))
    with pytest.raises(ConfigError, match=r":2: id: it is there twice"):
        read_keys(path)
    path.chmod(0o602)
    with pytest.raises(ConfigError, match="everybody may write"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_change_that_fails_leaves_the_file_alone(tmp_path) -> None:
    path = tmp_path / "keys"
    add(path)
    before, mark = path.read_bytes(), stamp(path)
    with pytest.raises(ConfigError, match="there is no key"):
        edit_keys(path, lambda keys: ([], api_keys.find(keys, "sk-aaaaaaaaaaaa")))
    assert path.read_bytes() == before
    assert stamp(path) == mark
    add(path)
    assert stamp(path) != mark
    # What a writer left that died in the middle is in nobody's way.
    (tmp_path / ".keys.new").write_text("half")
    add(path)
    assert len(read_keys(path)) == 3


class KeyLife(RuleBasedStateMachine):
    """Any order of making, rotating, revoking and waiting: the file accepts exactly the keys that it
    should.
    """

    made = Bundle("made")

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "keys"
        self.now_s = NOW_S
        self.until_s: dict[str, int] = {}
        """By key, the time from which it is not accepted any more."""
        self.from_s: dict[str, int] = {}
        self.tenant: dict[str, str] = {}

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    @rule(target=made, tenant=st.sampled_from("abc"), life=st.integers(0, 50), wait=st.integers(0, 20))
    def create(self, tenant: str, life: int, wait: int) -> str:
        expires_s = self.now_s + wait + life if life else 0
        not_before_s = self.now_s + wait if wait else 0
        issued = add(
            self.path, now_s=self.now_s, tenant=tenant, expires_s=expires_s, not_before_s=not_before_s
        )
        self._expect(issued, tenant, not_before_s, expires_s)
        return issued.key

    @rule(target=made, key=made, grace_s=st.integers(0, 30))
    def rotate(self, key: str, grace_s: int) -> str:
        def change(keys: tuple[ApiKey, ...]) -> tuple[list[ApiKey], Issued]:
            found = api_keys.find(keys, key[:15])
            old, issued = api_keys.rotate(found, self.now_s, grace_s=grace_s)
            return [*(old if k.id == old.id else k for k in keys), issued.record], issued

        if self.now_s >= self.until_s[key]:
            with pytest.raises(ConfigError):
                edit_keys(self.path, change)
            return key
        issued = edit_keys(self.path, change)
        self.until_s[key] = min(self.until_s[key], self.now_s + grace_s)
        self._expect(issued, self.tenant[key], 0, issued.record.expires_s)
        return issued.key

    @rule(key=consumes(made))
    def revoke(self, key: str) -> None:
        def change(keys: tuple[ApiKey, ...]) -> tuple[list[ApiKey], None]:
            old = api_keys.revoke(api_keys.find(keys, key), self.now_s)
            return [old if k.id == old.id else k for k in keys], None

        edit_keys(self.path, change)
        self.until_s[key] = 0

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def only_the_right_keys_are_accepted(self) -> None:
        if not getattr(self, "until_s", None):
            return
        keys = stored(self.path)
        assert len(keys) == len(self.until_s)
        for key, until_s in self.until_s.items():
            try:
                caller = keys.find(key.encode(), self.now_s)
            except Unauthenticated:
                assert not self.from_s[key] <= self.now_s < until_s
            else:
                assert caller is not None
                assert caller.tenant.id == self.tenant[key]
                assert self.from_s[key] <= self.now_s < until_s

    def _expect(self, issued: Issued, tenant: str, from_s: int, expires_s: int) -> None:
        self.until_s[issued.key] = expires_s or api_keys.FOREVER
        self.from_s[issued.key], self.tenant[issued.key] = from_s, tenant


KeyLife.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
TestKeyLife = KeyLife.TestCase


# --- through a socket ----------------------------------------------------------------------------


def test_keys_of_a_file_through_a_socket(start, kit, tmp_path) -> None:
    path = tmp_path / "keys"
    first, second = add(path, label="one"), add(path, label="two")
    other, late = add(path, tenant="other"), add(path, tenant="other", expires_s=NOW_S + 1)
    running = start(kit.replace(kit.make_config(), auth={"keys_file": str(path), "keys": ()}))
    for issued in (first, second, other):
        assert ask(running, issued.key)[0] == 200
    a, b, c = running.requests
    # A tenant's keys share its cache; other tenants' do not.
    assert a.cache_salt == b.cache_salt != c.cache_salt
    assert (a.fairness_key, c.fairness_key) == ("acme", "other")
    status, body = ask(running, late.key)
    assert (status, body["error"]["code"]) == (401, "expired_api_key")
    for wrong in (first.key[:-1] + "-", kit.KEY, first.record.prefix):
        status, body = ask(running, wrong)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    log = running.log_text.getvalue()
    assert not any(issued.key in log for issued in (first, second, other, late))
