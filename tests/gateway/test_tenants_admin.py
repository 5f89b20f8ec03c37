"""The endpoints about tenants and keys: what they show, what they change, and for whom."""

import http.client
import json

import msgspec
import pytest

from penstock.config.tenancy import TenantConfig
from penstock.gateway.api import tenants as tenants_module
from penstock.gateway.identity import api_keys, tenancy
from penstock.gateway.identity.api_keys import read_keys

ADMIN_KEY = "sk-admin-0123456789"


def send(running, path, body=None, *, key=ADMIN_KEY, method=None):
    """Status and JSON of one request."""
    link = http.client.HTTPConnection(running.host, running.port, timeout=20)
    data = None if body is None else json.dumps(body)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    link.request(method or ("GET" if body is None else "POST"), path, data, headers)
    response = link.getresponse()
    reported = json.loads(response.read())
    link.close()
    return response.status, reported


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.jsonl"


@pytest.fixture
def running(start, kit, path, monkeypatch):
    monkeypatch.setattr(tenancy, "KEYS_FILE_CHECK_S", 0.02)
    boss = api_keys.issue(0, tenant="ops", admin=True)
    api_keys.edit_keys(path, lambda _: ([boss.record], None))
    config = kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,), "keys_file": str(path)})
    acme = TenantConfig(id="acme", requests_per_minute=60, budget_per_day=2.5, models=("tiny",))
    return start(msgspec.structs.replace(config, tenants=(acme,)))


def test_tenants_show_limits_beside_use(running):
    status, reported = send(running, "/admin/tenants")
    assert (status, reported["total"]) == (200, 2)
    acme, ops = reported["tenants"]
    assert (acme["id"], acme["requests_per_minute"], acme["budget_day_micros"]) == ("acme", 60, 2_500_000)
    assert (acme["models"], acme["live"], acme["spent_day_micros"]) == (["tiny"], 0, 0)
    assert (ops["id"], ops["requests_per_minute"]) == ("ops", 0)


def test_a_key_is_made_shown_once_used_rotated_and_revoked(running, path, kit):
    before = running.gateway.tenancy.table.num_keys
    status, made = send(running, "/admin/keys", {"tenant": "acme", "label": "batch", "expires_days": 30})
    assert (status, made["tenant"], made["state"]) == (200, "acme", "active")
    assert made["expires_s"] - made["created_s"] == 30 * 86_400
    running.wait_until(lambda: running.gateway.tenancy.table.num_keys > before)
    assert send(running, "/v1/models", key=made["key"])[0] == 200
    listed = send(running, "/admin/keys")[1]
    assert listed["writable"] is True
    assert {key["label"] for key in listed["keys"]} == {"", "batch"}
    secret = made["key"].partition("_")[2]
    assert secret not in json.dumps(listed)
    assert secret not in path.read_text()
    assert "hash" not in listed["keys"][0]
    status, fresh = send(running, f"/admin/keys/{made['prefix']}/rotate", {"grace_days": 2})
    assert status == 200
    assert fresh["key"] != made["key"]
    assert send(running, f"/admin/keys/{fresh['prefix']}/revoke", {})[1]["state"] == "revoked"
    states = {key.prefix: bool(key.revoked_s) for key in read_keys(path)}
    assert (states[made["prefix"]], states[fresh["prefix"]]) == (False, True)
    assert "a key was made" in running.log_text.getvalue()
    assert secret not in running.log_text.getvalue()
    trail = send(running, "/admin/audit?kind=admin")[1]["events"]
    assert [(each["what"], each["about"]) for each in trail] == [
        ("key revoked", fresh["prefix"]), ("key rotated", fresh["prefix"]), ("key made", made["prefix"]),
    ]  # fmt: skip
    assert trail[1]["why"] == f"tenant acme, in place of {made['prefix']}"
    for key in (made["key"], fresh["key"], ADMIN_KEY):
        assert key not in json.dumps(trail)


@pytest.mark.parametrize(
    ("where", "body", "status", "code"),
    [
        ("", {"tenant": "no such id!"}, 400, "invalid_key"),
        ("", {"tenant": "acme", "tier": "gold"}, 400, "invalid_key"),
        ("", {"tenant": "acme", "admin": True}, 400, "invalid_value"),
        ("", {"tenant": "acme", "expires_days": -1}, 400, "invalid_value"),
        ("/sk-aaaaaaaaaaaa/revoke", {}, 404, "unknown_key"),
        ("/sk-aaaaaaaaaaaa/explode", {}, 404, "unknown_path"),
    ],
)
def test_orders_that_cannot_be_followed_change_nothing(running, path, where, body, status, code):
    before = path.read_bytes()
    got, reported = send(running, f"/admin/keys{where}", body)
    assert (got, reported["error"]["code"]) == (status, code)
    assert path.read_bytes() == before


def test_an_admins_key_is_not_handed_out_here(running, path):
    (boss,) = read_keys(path)
    assert send(running, f"/admin/keys/{boss.prefix}/rotate", {})[1]["error"]["code"] == "invalid_key"
    assert read_keys(path) == (boss,)


def test_without_a_file_no_key_is_made_and_a_tenant_may_nothing(start, kit):
    running = start(kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,)}))
    assert send(running, "/admin/keys")[1] == {"writable": False, "keys": [], "total": 0}
    assert send(running, "/admin/keys", {"tenant": "acme"})[1]["error"]["code"] == "no_keys_file"
    for path in ("/admin/tenants", "/admin/keys"):
        assert send(running, path, key=kit.KEY)[0] == 403
    assert send(running, "/admin/keys", {"tenant": "acme"}, key=kit.KEY)[0] == 403


def test_long_lists_come_in_pages(start, kit, path, monkeypatch):
    monkeypatch.setattr(tenants_module, "LISTED_MAX", 2)
    issued = [api_keys.issue(i, tenant=f"t{i}") for i in range(5)]
    api_keys.edit_keys(path, lambda _: ([each.record for each in issued], None))
    running = start(kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,), "keys_file": str(path)}))
    for what, name, wanted in (
        ("tenants", "id", ["t0", "t1", "t2", "t3", "t4"]),
        ("keys", "tenant", ["t4", "t3", "t2", "t1", "t0"]),
    ):
        pages = [send(running, f"/admin/{what}?offset={offset}")[1] for offset in (0, 2, 4, 6)]
        assert [[each[name] for each in page[what]] for page in pages] == [
            wanted[:2], wanted[2:4], wanted[4:], [],
        ]  # fmt: skip
        assert {page["total"] for page in pages} == {5}
        assert send(running, f"/admin/{what}?offset=x")[0] == 400
