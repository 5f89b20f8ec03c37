"""The console in front of a real gateway: keys, roles, and the playground."""

import importlib.util
from pathlib import Path

import pytest

from penstock.gateway.identity import api_keys

pytestmark = pytest.mark.console
ADMIN_KEY = "sk-admin-0123456789"
spec = importlib.util.spec_from_file_location(
    "gateway_conftest", Path(__file__).parents[1] / "gateway" / "conftest.py"
)
gateway_kit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gateway_kit)


@pytest.fixture
def served(tmp_path):
    tenant = api_keys.issue(0, tenant="acme")
    path = tmp_path / "keys.jsonl"
    api_keys.edit_keys(path, lambda _: ([tenant.record], None))
    config = gateway_kit.replace(
        gateway_kit.make_config(), auth={"admin_keys": (ADMIN_KEY,), "keys_file": str(path)}
    )
    config = gateway_kit.replace(config, server={"trust_local": False})
    running = gateway_kit.RunningGateway(config, small=True)
    running.tenant_key = tenant.key
    yield running
    running.stop()


def sign_in(opened, key: str) -> None:
    opened.get_by_label("API key").fill(key)
    opened.get_by_role("button", name="Sign in").click()


def test_it_asks_for_a_key_and_forgets_it_with_the_page(page, served, findings) -> None:
    opened = page(served.url + "/")
    opened.wait_for_url("**/console")
    opened.get_by_role("heading", name="Sign in").wait_for()
    assert findings(opened) == []
    sign_in(opened, "sk-wrong")
    opened.get_by_role("heading", name="This key was not accepted").wait_for()
    sign_in(opened, ADMIN_KEY)
    opened.get_by_role("heading", name="Fleet").wait_for()
    assert opened.locator("a.worker").count() == 2
    opened.get_by_role("link", name="Capacity").click()
    opened.get_by_text("No model scales").wait_for()
    opened.get_by_role("link", name="Rollouts").click()
    opened.get_by_text("No model has two versions").wait_for()
    assert opened.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
    opened.reload()
    opened.get_by_role("heading", name="Sign in").wait_for()


def test_a_tenant_sees_its_models_and_requests_and_no_workers(page, served) -> None:
    opened = page(served.url + "/console")
    sign_in(opened, served.tenant_key)
    opened.get_by_role("heading", name="Models").wait_for()
    assert opened.locator("nav a").all_inner_texts() == [
        "Fleet",
        "Requests",
        "Playground",
        "Tenants",
        "Reports",
    ]
    assert "tiny-0" not in opened.inner_text("main")


def test_the_playground_streams_two_answers_and_one_is_found_in_requests(
    page, until, served, findings
) -> None:
    opened = page(served.url + "/console#/playground")
    sign_in(opened, ADMIN_KEY)
    opened.get_by_label("A tenant's API key").fill(served.tenant_key)
    opened.get_by_role("button", name="Use it").click()
    opened.get_by_text("Options").click()
    opened.get_by_label("Most tokens").fill("5")
    opened.get_by_role("button", name="Who are you?").click()
    until(opened, "document.querySelectorAll('.turn-facts').length === 1")
    assert opened.locator(".turn.user").inner_text().endswith("Who are you?")
    opened.get_by_role("button", name="New chat").click()
    opened.get_by_role("button", name="Side by side").click()
    opened.get_by_label("Your message").fill("hello")
    opened.get_by_label("Your message").press("Enter")
    until(opened, "document.querySelectorAll('.turn-facts').length === 2")
    assert opened.locator(".turn.assistant .problem").count() == 0
    assert "TTFT" in opened.locator(".turn-facts").first.inner_text()
    opened.get_by_text("As code").click()
    assert f"curl {served.url}/v1/chat/completions" in opened.locator("pre").inner_text()
    assert findings(opened) == []
    opened.locator("a", has_text="its life").first.click()
    opened.locator(".waterfall").wait_for()


def test_a_key_is_made_shown_once_and_revoked(page, until, served, findings) -> None:
    opened = page(served.url + "/console#/tenants")
    sign_in(opened, ADMIN_KEY)
    opened.get_by_label("Tenant", exact=True).fill("acme")
    opened.get_by_role("button", name="Make a key").click()
    made = opened.locator(".fresh-key code").inner_text()
    assert made.startswith("sk-")
    assert findings(opened) == []
    opened.get_by_role("button", name="Done").click()
    assert made not in opened.content()
    opened.locator("tr", has_text=made.partition("_")[0]).get_by_role("button", name="Revoke…").click()
    opened.get_by_role("button", name="Revoke", exact=True).click()
    opened.locator("tr", has_text=made.partition("_")[0]).get_by_text("revoked").wait_for()
    opened.get_by_role("link", name="Alerts").click()
    opened.get_by_label("Show").select_option(label="What admins did")
    until(opened, "document.querySelectorAll('tbody tr').length === 2")
    rows = opened.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[2] for row in rows] == ["key revoked", "key made"]
    assert made not in opened.content()
