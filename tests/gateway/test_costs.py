"""What requests and machines cost, over sockets: by tenant, model and day, beside its floor; for admins."""

import datetime
import http.client
import json

import msgspec
import pytest

from penstock.clock import NS_PER_S
from penstock.config.ledger import ModelPrice
from penstock.gateway.api import costs
from penstock.telemetry.costs import COSTS_DIRECTORY, CostSums

ADMIN_KEY = "sk-admin-0123456789"
PRICES = {
    "currency": "EUR",
    "accelerators": {"tiny": 3600.0},
    "models": (ModelPrice(model="*", input=10.0, output=1000.0),),
}


def look(running, path="/admin/costs", key=ADMIN_KEY):
    """Status and JSON."""
    link = http.client.HTTPConnection(running.host, running.port, timeout=20)
    link.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    response = link.getresponse()
    reported = json.loads(response.read())
    link.close()
    return response.status, reported


def chat(kit, running, key):
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/chat/completions", kit.chat(max_tokens=5), "Connection: close", key=key))
    assert b" 200 " in raw.read_all()
    raw.close()


@pytest.fixture
def priced(start, kit, tmp_path):
    config = kit.replace(
        kit.make_config(),
        auth={"admin_keys": (ADMIN_KEY,)},
        ledger={"directory": str(tmp_path / "ledger")},
        prices=PRICES,
    )
    return start(config)


def settled(running, num):
    """What is told once so many requests have been written down."""
    for _ in range(5_000):
        reported = look(running)[1]
        if reported["total"]["requests"] == num:
            return reported
    raise AssertionError(reported)


def test_requests_by_tenant_model_adapter_and_day(priced, kit, monkeypatch):
    monkeypatch.setattr(costs, "FRESH_S", 0)
    one, other = kit.make_config().auth.keys
    for key in (one, one, other):
        chat(kit, priced, key)
    reported = settled(priced, 3)
    assert (reported["by"], reported["currency"], reported["is_priced"], reported["num_lines"]) == (
        "tenant",
        "EUR",
        True,
        2,
    )
    first, second = reported["usage"]
    assert (first["requests"], second["requests"]) == (2, 1), "the dearest first"
    assert first["completion_tokens"] == 10
    assert first["cost_micros"] == 10 * first["prompt_tokens"] + 1000 * 10
    assert reported["total"]["cost_micros"] == first["cost_micros"] + second["cost_micros"]
    (model,) = look(priced, "/admin/costs?by=model&days=1")[1]["usage"]
    assert (model["name"], model["requests"]) == ("tiny", 3)
    (adapter,) = look(priced, "/admin/costs?by=adapter")[1]["usage"]
    assert (adapter["name"], adapter["requests"]) == ("", 3)
    (day,) = look(priced, "/admin/costs?by=day")[1]["usage"]
    assert (len(day["name"]), day["requests"]) == (10, 3)


def test_machines_beside_their_floor_by_model_and_day(priced, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "FRESH_S", 0)
    now_s = priced.gateway._services.clock.wall_ns() // NS_PER_S
    today, long_ago = (
        datetime.datetime.fromtimestamp(now_s - ago * 86_400, datetime.UTC).strftime("%Y-%m-%d")
        for ago in (0, 40)
    )
    place = tmp_path / "ledger" / COSTS_DIRECTORY
    place.mkdir(parents=True, exist_ok=True)
    sums = CostSums(busy=6.0, idle=3.0, reserve=1.0, charged=5.0, floor=2.5, tokens=4e6)
    for day in (today, long_ago):
        (place / f"{day}-another-server.json").write_bytes(msgspec.json.encode({"big": sums}))
    reported = look(priced, "/admin/costs?days=7")[1]
    (machine,) = [each for each in reported["machines"] if each["name"] == "big"]
    account = machine["account"]
    parts = [account[part] for part in ("requests", "platform", "idle", "reserve")]
    assert (sum(parts), parts) == (account["bill"], [5.0, 1.0, 3.0, 1.0])
    assert (account["per_million"], account["floor_per_million"], account["over_floor"]) == (2.5, 0.625, 4.0)
    by_day = look(priced, "/admin/costs?by=day&days=92")[1]
    assert [each["name"] for each in by_day["machines"]] == [today, long_ago]
    assert by_day["machines_total"]["tokens"] == 8_000_000


@pytest.mark.parametrize("query", ["by=key", "days=0", "days=93", "days=many", "by=tenant&days=-1"])
def test_another_question_is_refused(priced, query):
    status, reported = look(priced, f"/admin/costs?{query}")
    assert (status, reported["error"]["code"]) == (400, "invalid_value")


def test_a_look_is_kept_for_a_while_and_is_an_admins(priced, kit, monkeypatch):
    monkeypatch.setattr(costs, "FRESH_S", 3600)
    assert look(priced)[1]["total"]["requests"] == 0
    chat(kit, priced, kit.KEY)
    assert look(priced)[1]["total"]["requests"] == 0, "the same answer, without asking the disk again"
    assert look(priced, key=kit.KEY)[0] == 403


def test_without_a_ledger_it_says_so(start, kit):
    running = start(
        kit.replace(kit.make_config(), auth={"admin_keys": (ADMIN_KEY,)}, ledger={"enabled": False})
    )
    status, reported = look(running)
    assert (status, reported["error"]["code"]) == (400, "no_ledger")
