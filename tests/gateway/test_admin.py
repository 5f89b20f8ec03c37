"""The endpoints under /admin: what they show, and whom."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import pytest
from fleets import Prepared
from told_script import NEVER_S

from penstock.gateway.api.worker_trails import LeftAlone, WorkerTrails
from penstock.protocol.worker import Stats
from penstock.telemetry.audit import Notes
from penstock.types import WorkerId

ADMIN_KEY = "sk-admin-0123456789"
WORKERS = "/admin/workers"


def send(running, path, body=None, *, key=ADMIN_KEY, method=None):
    """Status and JSON of one request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
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
    from penstock.gateway.identity import api_keys
    from penstock.gateway.identity.api_keys import edit_keys

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
    (line,) = send(running, "/status.json")[1]["workers"]
    assert (line["id"], line["engine"], line["state"]) == ("tiny-0", "penstock", "ready")
    (model,) = report["models"]
    assert (model["name"], model["ready"], model["workers"], model["waiting"]) == ("tiny", 1, 1, 0)
    assert model["ttft_count"] == 1
    assert model["ttft_sum_s"] > 0


def test_a_decision_is_explained_to_whoever_runs_the_fleet_only(running, kit):
    _, answer = send(running, "/v1/chat/completions", kit.chat(max_tokens=2), key=kit.KEY)
    path = f"/admin/explain/{answer['id']}"
    assert send(running, path, key=kit.KEY)[0] == 403
    status, reported = send(running, path)
    assert status == 200
    (decision,) = reported["decisions"]
    assert (decision["worker"], decision["reason"], decision["policy"]) == ("tiny-0", "only", "ttft")
    (candidate,) = decision["candidates"]
    assert set(candidate["parts"]) == {
        "wait_s",
        "reload_s",
        "prefill_s",
        "adapter_s",
        "others_s",
        "tpot_s",
        "pressure_s",
    }
    assert decision["request"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_request_that_nobody_knows_is_not_explained(running):
    status, body = send(running, "/admin/explain/chatcmpl-nobody")
    assert status == 404
    assert body["error"]["code"] == "unknown_request"


def with_worker(running, name="m/x@h:1", *, step_s=0.0):
    """One more worker, which a source wants."""
    wanted = Prepared(WorkerId(name), "tiny", running.clock, step_s=step_s)
    applying = running.members.apply("test", [wanted])
    asyncio.run_coroutine_threadsafe(applying, running.loop).result(10)
    return wanted


def workers_of(running):
    return {worker["id"]: worker for worker in send(running, WORKERS)[1]["workers"]}


def test_a_drained_worker_ends_its_streams_leaves_and_comes_back_when_asked(running, kit):
    wanted = with_worker(running)
    path = f"{WORKERS}/m%2Fx@h:1"
    assert workers_of(running)["m/x@h:1"]["state"] == "ready"
    assert send(running, f"{path}/drain", {"timeout_s": 1})[0] == 200
    running.wait_until(lambda: running.registry.get(wanted.id) is None)
    drained = workers_of(running)["m/x@h:1"]
    assert (drained["state"], drained["stage"]) == ("gone", "drained by hand")
    with_worker(running)  # A source that says the same again does not bring it back.
    assert running.registry.get(wanted.id) is None
    assert send(running, f"{path}/drain", method="POST")[0] == 200, "once more changes nothing"
    assert send(running, f"{path}/undrain", method="POST")[1]["state"] == "ready"
    assert workers_of(running)["m/x@h:1"]["epoch"] == 1, "it is a new one"
    events = send(running, "/admin/audit?kind=admin&most=2")[1]["events"]
    assert [(each["what"], each["about"]) for each in events] == [
        ("brought back", "m/x@h:1"), ("drained", "m/x@h:1"),
    ]  # fmt: skip
    (by,) = {each["by"] for each in events}
    assert re.fullmatch("admin-[0-9a-f]{8}", by), "an id that tells admins' keys apart, and is not one"
    assert send(running, f"/admin/audit?before={events[-1]['number']}")[1]["events"][-1]["what"] == "started"
    assert send(running, "/v1/chat/completions", kit.chat(max_tokens=2), key=kit.KEY)[0] == 200


def test_a_stream_outlives_the_order_to_drain_and_undrain_waits_for_its_end(start, kit):
    config = kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,)})
    running = start(config)
    asyncio.run_coroutine_threadsafe(empty(running), running.loop).result(10)
    wanted = with_worker(running, step_s=NEVER_S)
    (backend,) = wanted.backends
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/chat/completions", kit.chat(stream=True, seed=1, max_tokens=2)))
    running.wait_until(lambda: backend.num_streams == 1)
    running.call(backend._step)
    raw.read_until(b'"content":" ')
    answer = send(running, f"{WORKERS}/m%2Fx@h:1/drain", method="POST")[1]
    assert (answer["state"], answer["streams"]) == ("draining", 1)
    assert send(running, f"{WORKERS}/m%2Fx@h:1/undrain", method="POST")[1]["state"] == "draining"
    running.call(backend._step)
    assert b"[DONE]" in raw.read_until(b"[DONE]")
    raw.close()
    running.wait_until(lambda: len(wanted.backends) == 2 and running.registry.get(wanted.id).is_ready)


async def empty(running) -> None:
    """Take the gateway's own workers away."""
    for worker in list(running.registry):
        running.registry.remove(worker.id)


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/nobody/drain", None, 404, "no such worker"),
        ("/nobody/undrain", None, 404, "no such worker"),
        ("/tiny-0/explode", None, 404, "/drain and /undrain"),
        ("/drain", None, 404, "/drain and /undrain"),
        ("/tiny-0/drain", {"timeout_s": -1}, 400, "timeout_s"),
        ("/tiny-0/drain", {"timeout": 1}, 400, "timeout"),
        ("/tiny-0/drain", [], 400, "object"),
    ],
)
def test_orders_that_cannot_be_followed_are_refused(running, path, body, status, word):
    got, answer = send(running, f"{WORKERS}{path}", body, method="POST")
    assert got == status
    assert word in answer["error"]["message"]
    assert workers_of(running)["tiny-0"]["state"] == "ready"


@pytest.mark.parametrize("query", ["kind=nothing", "most=0", "before=-1", "most=9999999999999999999"])
def test_the_audit_trail_is_for_admins_and_takes_no_nonsense(running, kit, query):
    assert send(running, "/admin/audit", key=kit.KEY)[0] == 403
    status, body = send(running, f"/admin/audit?{query}")
    assert (status, body["error"]["param"]) == (400, query.partition("=")[0])


def test_a_workers_last_minutes_and_that_it_was_left_alone_are_remembered(running, kit):
    now_s, sizes = 1_700_000_000, {"blocks_total": 8, "blocks_used": 2, "blocks_cached": 0}

    class Clock:
        wall_ns = now_ns = staticmethod(lambda: now_s * 10**9)

    trails = WorkerTrails(running.registry, Clock())
    status = running.registry.get("tiny-0").backend.status
    for tokens in (0, 500, 1500, None, 100):
        said = tokens is not None
        status.stats = Stats(step=1, running=3, waiting=1, generated_tokens=tokens, **sizes) if said else None
        now_s += 5
        trails.sample()
        trails.sample()
    found = trails.of("tiny-0")
    assert (found.step_s, len(found.times), found.times[-1]) == (5, 180, now_s)
    assert found.tokens_per_s[-6:] == [None, None, 100, 200, None, None]
    assert (found.running[-2:], found.kv_share[-1], found.kv_share[0]) == ([None, 3], 0.25, None)
    now_s += 5 * 178
    trails.sample()
    assert trails.of("tiny-0").waiting[:3] == [None, 1, None]
    now_s += 5 * 180
    running.registry.remove("tiny-0")
    trails.sample()
    assert trails.of("tiny-0") is None
    reported, alone = [], {"m": {"m-0": "it fails"}}
    left = LeftAlone(alone.__getitem__, Notes(Clock(), reported.append))
    left.look("m")
    alone["m"] = {}
    left.look("m")
    left.look("m")
    assert [(each.what, each.why) for each in reported] == [
        ("is left alone", "it fails"), ("is used again, or not ready", ""),
    ]  # fmt: skip


def test_a_workers_history_is_asked_for_by_its_name(running):
    running.wait_until(lambda: running.gateway._trails.of("tiny-0") is not None)
    status, reported = send(running, f"{WORKERS}/tiny-0/history")
    assert (status, reported["step_s"], len(reported["running"])) == (200, 5, 180)
    for path, code in (("nobody/history", "unknown_worker"), ("tiny-0/nothing", "unknown_path")):
        status, body = send(running, f"{WORKERS}/{path}")
        assert (status, body["error"]["code"]) == (404, code)


def test_a_tenant_may_not_drain(running, kit):
    assert send(running, f"{WORKERS}/tiny-0/drain", key=kit.KEY, method="POST")[0] == 403
    assert send(running, f"{WORKERS}/tiny-0/drain", method="GET")[0] == 404
    assert workers_of(running)["tiny-0"]["state"] == "ready"


def test_the_history_has_what_was_answered_and_what_was_refused(running, kit):
    status, empty = send(running, "/admin/history")
    assert (status, empty["step_s"], len(empty["times"]), empty["series"]) == (200, 5, 180, [])
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert send(running, "/v1/chat/completions", chat, key=kit.KEY)[0] == 200
    assert send(running, "/v1/chat/completions", chat | {"max_tokens": 10**6}, key=kit.KEY)[0] == 400
    assert send(running, "/admin/history?seconds=3600")[1]["total_summary"]["requests"] == [2]
    (summary,) = send(running, "/admin/history?seconds=900")[1]["summary"]
    assert (summary["model"], summary["band"]) == ("tiny", "default")
    assert summary["outcomes"] == {"length": [1], "rejected": [1]}
    assert summary["generated_tokens"] == [4]
    assert summary["ttft_due"] == summary["tpot_due"] == [1]
    status, report = send(running, "/admin/alerts")
    assert (status, [alert["name"] for alert in report["firing"]]) == (200, [])
    objectives = {(row["band"], row["objective"], row["windows"][0]["total"]) for row in report["slo"]}
    assert objectives == {("default", each, 1) for each in ("availability", "ttft", "tpot")}
    for wrong in ("0", "-5", "1.5", "86401", "9" * 30, "x"):
        assert send(running, f"/admin/history?seconds={wrong}")[0] == 400
    assert send(running, "/admin/history", key=kit.KEY)[0] == 403
