"""The console in a real Chromium: `make test-console`."""

import re

import pytest

pytestmark = pytest.mark.console
WIDTHS = {"desk": (1320, 860), "phone": (390, 844)}
PLACES = ("fleet", "fleet/chat-70b-03", "traffic", "requests")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", WIDTHS)
def test_nothing_serious_for_who_cannot_see_or_point(page, until, replay, findings, size, dark) -> None:
    width, height = WIDTHS[size]
    opened = page(replay().url + "/console", width=width, height=height, dark=dark)
    for place in PLACES:
        opened.evaluate(f"location.hash = '#/{place}'")
        opened.wait_for_selector("h1")
        until(opened, "!document.querySelector('.skeleton')")
        assert findings(opened) == [], place
        overflow = opened.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{place} is {overflow} px wider than the window"


def test_the_fleet_is_live_and_a_worker_is_drained_and_brought_back(page, until, replay) -> None:
    server = replay(period_s=0.1)
    opened = page(server.url + "/console")
    card = opened.locator("a.worker", has_text="chat-70b-03")
    before = card.inner_text()
    until(
        opened,
        "before => [...document.querySelectorAll('a.worker')].find(e => e.innerText.includes('chat-70b-03'))"
        ".innerText !== before",
        arg=before,
    )
    assert opened.locator("a.worker", has_text="chat-8b-11").inner_text().endswith("loading weights, 43 %")
    card.click()
    panel = opened.get_by_role("complementary", name="chat-70b-03")
    panel.get_by_role("button", name="Drain…").click()
    panel.get_by_role("button", name="Drain", exact=True).click()
    panel.get_by_role("button", name="Bring it back").click()
    panel.get_by_role("button", name="Drain…").wait_for()
    assert server.orders == [f"/admin/workers/chat-70b-03/{verb}" for verb in ("drain", "undrain")]


def test_all_of_it_goes_by_keyboard(page, replay) -> None:
    opened = page(replay().url + "/console")
    opened.wait_for_selector("a.worker")
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.innerText").strip() == "Skip to the content"
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "main"
    opened.locator("a.worker").first.focus()
    opened.keyboard.press("Enter")
    opened.wait_for_selector("aside.drawer")
    assert opened.evaluate("document.activeElement.classList.contains('drawer')")
    opened.keyboard.press("Escape")
    opened.wait_for_selector("aside.drawer", state="detached")
    opened.evaluate("location.hash = '#/traffic'")
    plot = opened.locator(".plot").first
    plot.focus()
    opened.keyboard.press("ArrowLeft")
    assert re.search(r"\d\d:\d\d:\d\d: answered [\d.]+", plot.get_attribute("aria-label"))


def test_traffic_reads_a_moment_on_all_charts_and_narrows_to_one_model(page, until, replay) -> None:
    opened = page(replay().url + "/console#/traffic")
    opened.wait_for_selector(".plot svg path")
    opened.locator(".plot").nth(2).hover(position={"x": 200, "y": 60})
    until(opened, "document.querySelectorAll('.cursor').length === 6")
    whole = opened.locator(".kpi-value").first.inner_text()
    opened.get_by_label("Show").select_option(label="chat-8b · default")
    until(opened, "w => document.querySelector('.kpi-value').innerText !== w", whole)
    opened.get_by_role("button", name="24 h").click()
    until(opened, "document.querySelectorAll('.tick').length > 0")


def test_a_request_is_found_and_its_life_is_drawn(page, until, replay) -> None:
    server = replay()
    opened = page(server.url + "/console#/requests")
    opened.wait_for_selector("tbody a")
    opened.get_by_role("button", name="Hold").click()
    wanted = opened.locator("tbody tr", has_text="stop").nth(2).locator("a").inner_text()
    opened.get_by_role("searchbox").fill(wanted)
    until(opened, "document.querySelectorAll('tbody tr').length === 1")
    opened.get_by_role("searchbox").press("Enter")
    panel = opened.get_by_role("complementary", name=wanted)
    panel.locator(".waterfall").wait_for()
    names = panel.locator(".wf-name").all_inner_texts()
    assert names == ["Admit", "Queue", "Prefill", "Decode"]
    assert panel.locator(".candidates li.picked").count() == 1
    assert "not possible: not ready" in panel.inner_text()
    opened.get_by_label("Ended").select_option(label="Not answered")
    opened.get_by_role("searchbox").fill("")
    until(opened, "[...document.querySelectorAll('tbody .state')].every(e => e.innerText !== 'stop')")


def test_a_lost_server_is_said_and_found_again(page, replay) -> None:
    server = replay()
    opened = page(server.url + "/console")
    opened.wait_for_selector(".link.live")
    opened.route("**/console/feed", lambda route: route.abort())
    opened.evaluate("dispatchEvent(new Event('offline'))")
    server.stopped.set()
    opened.wait_for_selector(".banner")
    assert "the last known" in opened.locator(".banner").inner_text()
    assert opened.locator("a.worker").count() == 12
