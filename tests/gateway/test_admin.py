"""The endpoints under /admin: what they show, and whom."""

import json
import urllib.error
import urllib.request

import pytest

ADMIN_KEY = "sk-admin-0123456789"
WORKERS = "/admin/workers"


def send(running, path, body=None, *, key=ADMIN_KEY, method=None):
    """Status and JSON of one request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(running.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def running(start, kit):
    return start(kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,)}))


def test_a_tenants_key_may_not_and_an_admin_key_may_nothing_else(running, kit):
    assert send(running, WORKERS, key="")[0] == 401
    assert send(running, WORKERS, key="sk-unknown")[0] == 401
    status, body = send(running, WORKERS, key=kit.KEY)
    assert status == 403
    assert "auth.admin_keys" in body["error"]["message"]
    assert send(running, WORKERS)[0] == 200
    assert send(running, "/v1/models")[0] == 401


def test_a_key_may_be_both(start, kit):
    running = start(kit.replace(kit.make_config(), auth={"admin_keys": (kit.KEY,)}))
    assert send(running, WORKERS, key=kit.KEY)[0] == send(running, "/v1/models", key=kit.KEY)[0] == 200


def test_a_stored_key_with_the_flag_may(start, kit, tmp_path):
    from penstock.gateway import api_keys
    from penstock.gateway.key_file import edit_keys

    now_s = 1_800_000_000
    issued = [api_keys.issue(0, tenant="ops", admin=admin) for admin in (False, True)]
    rotated = api_keys.rotate(issued[1].record, now_s, grace_s=0)[1]
    path = tmp_path / "keys.jsonl"
    edit_keys(path, lambda _: ([each.record for each in (*issued, rotated)], None))
    running = start(kit.replace(kit.make_config(), auth={"keys_file": str(path)}))
    assert [send(running, WORKERS, key=each.key)[0] for each in (*issued, rotated)] == [403, 200, 200]
    assert send(running, "/v1/models", key=issued[1].key)[0] == 200


def test_without_authentication_everybody_on_this_machine_may(start, kit):
    running = start(kit.replace(kit.make_config(), auth={"keys": (), "disabled": True}))
    assert send(running, WORKERS, key="")[0] == 200


def test_the_list_says_how_every_worker_and_model_is(running, kit):
    send(running, "/v1/chat/completions", kit.chat(max_tokens=2), key=kit.KEY)
    report = send(running, WORKERS)[1]
    (worker,) = report["workers"]
    assert worker["id"] == "tiny-0"
    assert worker["model"] == "tiny"
    assert worker["state"] == "ready"
    assert worker["restarts"] == 0
    (model,) = report["models"]
    assert (model["name"], model["ready"], model["workers"], model["waiting"]) == ("tiny", 1, 1, 0)
    assert model["ttft_count"] == 1
    assert model["ttft_sum_s"] > 0


def test_a_decision_is_explained_to_whoever_runs_the_fleet_only(running, kit):
    _, answer = send(running, "/v1/chat/completions", kit.chat(max_tokens=2), key=kit.KEY)
    path = f"/admin/explain/{answer['id']}"
    assert send(running, path, key=kit.KEY)[0] == 403
    status, told = send(running, path)
    assert status == 200
    (decision,) = told["decisions"]
    assert (decision["worker"], decision["reason"], decision["policy"]) == ("tiny-0", "only", "ttft")
    (candidate,) = decision["candidates"]
    assert set(candidate["parts"]) == {"wait_s", "reload_s", "prefill_s", "adapter_s", "tpot_s", "pressure_s"}
    assert decision["request"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_request_that_nobody_knows_is_not_explained(running):
    status, body = send(running, "/admin/explain/chatcmpl-nobody")
    assert status == 404
    assert body["error"]["code"] == "unknown_request"
