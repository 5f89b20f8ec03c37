"""The console in a real Chromium: `make test-console`."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.main import main

pytestmark = pytest.mark.console
RESULTS = Path(__file__).parents[2] / "docs" / "results"
WIDTHS = {"desk": (1320, 860), "phone": (390, 844)}
PLACES = (
    "fleet", "fleet/chat-70b-03", "traffic", "requests", "tenants", "capacity", "rollouts", "costs", "alerts",
    "reports",
)  # fmt: skip


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


def test_traffic_tells_what_is_left_of_the_worst_error_budget(page, until, replay) -> None:
    opened = page(replay().url + "/console#/traffic")
    until(opened, "document.querySelector('.kpi:last-child .kpi-value')?.innerText === '10 %'")
    assert opened.locator(".kpi").last.inner_text().endswith("TTFT, 3 days")


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
    assert names == ["Admit", "Limits", "Queue", "Worker", "Prefill", "Decode"]
    assert re.search(r"in \d chunks?$", panel.locator(".wf-note").nth(3).inner_text())
    assert f"penstock explain {server.known[wanted]['request_id']} --replay" in panel.inner_text()
    assert panel.locator(".candidates li.picked").count() == 1
    assert "not possible: not ready" in panel.inner_text()
    server.known[wanted] |= {"attempts": 2, "migrations": 1, "ttft_ms": 120.0, "total_ms": 2000.0}
    panel.get_by_role("button", name="Close").click()
    opened.locator("tbody a").click()
    panel.locator(".wf-name", has_text="Moved").wait_for()
    assert panel.locator(".wf-name").all_inner_texts() == ["Admit", "Limits", "Queue", "Worker", "Moved"]
    assert "went on at" in panel.locator(".wf-note").last.inner_text()
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


def stream(*deltas, finish):
    """A chat completion as server-sent events."""
    chunks = [{"choices": [{"index": 0, "delta": each}]} for each in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"


def test_a_tool_is_called_in_the_playground_and_its_result_goes_back(page, until, replay, findings) -> None:
    asked = []
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    answers = [
        stream({"tool_calls": [call]}, {"tool_calls": [rest]}, finish="tool_calls"),
        stream({"content": "It rains."}, finish="stop"),
    ]

    def answer(route) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body=answers[len(asked) - 1], content_type="text/event-stream")

    opened = page(replay().url + "/console")
    opened.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "chat-8b"}]}))
    opened.route("**/v1/chat/completions", answer)
    opened.get_by_role("link", name="Playground").click()
    opened.get_by_text("Options").click()
    opened.get_by_label("Tools").fill('{"name": "weather", "param')
    opened.get_by_label("Your message").fill("weather?")
    opened.get_by_label("Your message").press("Enter")
    opened.get_by_text("The tools in Options are not JSON").first.wait_for()
    opened.get_by_label("Tools").fill('{"name": "weather", "parameters": {"type": "object"}}')
    opened.get_by_label("JSON schema").fill('{"type": "object"}')
    opened.get_by_label("Your message").press("Enter")
    opened.get_by_label("Result of weather").fill("rain")
    assert json.loads(opened.locator(".call pre").inner_text()) == {"city": "Oslo"}
    assert findings(opened) == []
    opened.get_by_role("button", name="Send the result").click()
    opened.get_by_text("It rains.").wait_for()
    first, second = asked
    assert first["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert second["messages"][2] == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    opened.get_by_text("As code").click()
    assert '"tool_call_id": "call_1"' in opened.locator(".as-code pre").inner_text()
    opened.get_by_role("button", name="Python").click()
    assert "tools=json.loads(" in opened.locator(".as-code pre").inner_text()


def test_costs_by_tenant_and_by_day_beside_their_floor(page, until, replay) -> None:
    opened = page(replay().url + "/console#/costs")
    machines = opened.get_by_role("region", name="The machines")
    dear = machines.get_by_role("row", name="chat-8b")
    dear.wait_for()
    assert dear.get_by_role("cell").all_inner_texts()[-3:] == ["2.27", "0.949", "2.4×"]
    assert opened.get_by_role("img", name="chat-8b: requests 57 %, platform 2.4 %, idle 30 %").count() == 1
    tenants = opened.get_by_role("region", name="The requests").locator("tbody th").all_inner_texts()
    assert tenants == ["acme", "globex", "initech", "umbrella", "All"]
    opened.get_by_role("button", name="Day", exact=True).click()
    until(opened, "document.querySelector('tbody th').innerText === '2026-11-18'")
    assert machines.locator("tbody th").all_inner_texts() == ["2026-11-18", "2026-11-17"]


def test_a_version_is_tried_promoted_and_taken_back(page, until, replay, findings) -> None:
    server = replay()
    server.fleet.models += ("chat-8b@1", "chat-8b@2", "support@1", "support@2")
    opened = page(server.url + "/console#/rollouts")
    support = opened.get_by_role("region", name="support@1 to support@2")
    support.get_by_role("region", name="Figures of support@2").wait_for()
    assert support.locator("[aria-current=step]").inner_text() == "5 %"
    assert "waits for certainty about failures" in support.inner_text()
    drawn = support.get_by_role("img").nth(4).get_attribute("aria-label")
    assert re.fullmatch(
        r"failures: [+−]0.\d\d %, surely between −0.\d\d % and \+0.\d\d %; \+0.20 % is allowed", drawn
    )
    taken_back = opened.get_by_role("region", name="chat-8b@1 to chat-8b@2")
    assert taken_back.get_by_role("button").count() == 0
    opened.get_by_label("Version").select_option("chat-8b@2")
    assert opened.get_by_label("Version").locator("option").all_inner_texts() == ["chat-8b@1", "chat-8b@2"]
    opened.get_by_label("Steps, % of conversations").fill("2, 50")
    opened.get_by_label("Minutes a step, at most").fill("5")
    opened.get_by_role("button", name="Begin").click()
    until(opened, "[...document.querySelectorAll('.steps')].some(e => e.innerText.startsWith('2 %'))")
    plan = {"model": "chat-8b", "candidate": "chat-8b@2", "steps": [2, 50], "step_s": 300}
    plan |= {"shadow": 0, "promotes": False}
    assert server.plans == [plan]
    assert findings(opened) == []
    support.get_by_role("button", name="Promote…").click()
    assert "Not every step is over" in support.get_by_role("alertdialog").inner_text()
    support.get_by_role("button", name="Promote", exact=True).click()
    support.get_by_role("button", name="Back to the old version…").click()
    support.get_by_role("button", name="Go back").click()
    support.get_by_text("aborted", exact=True).wait_for()
    assert server.orders[1:] == ["/admin/rollouts/support/promote", "/admin/rollouts/support/abort"]


def test_capacity_tells_its_opinions_and_takes_an_order_with_an_end(page, until, replay, findings) -> None:
    server = replay()
    opened = page(server.url + "/console#/capacity")
    model = opened.get_by_role("region", name="Capacity of chat-8b", exact=True)
    opinions = model.get_by_role("region", name="Opinions").locator("tbody tr")
    opinions.first.wait_for()
    assert opinions.locator("th").all_inner_texts() == [
        "The load now",
        "The load to come",
        "The least number",
    ]
    assert opinions.nth(1).get_attribute("class") == "followed"
    spot = model.get_by_role("region", name="Pools of chat-8b").get_by_role("row", name="spot")
    assert spot.get_by_role("cell").all_inner_texts()[:6] == ["4", "3", "1", "1", "0", "8"]
    plot = model.locator(".plot").first
    plot.focus()
    plot.press("End")
    assert re.search(r"ready 6, starting 1, to be 7$", plot.get_attribute("aria-label"))
    moves = model.get_by_role("region", name="Decisions on chat-8b").locator("tbody tr")
    assert moves.count() == 4
    assert "fleet.scale_workers is 7" in moves.nth(1).inner_text()
    assert "fewer" in moves.nth(2).inner_text()
    assert "more (advice)" in moves.nth(3).inner_text()
    moves.nth(0).get_by_role("button").click()
    assert "3.20k tokens/s are safe; 40 s to get ready" in moves.nth(0).inner_text()
    assert findings(opened) == []
    model.get_by_label("Workers, by order").fill("9")
    model.get_by_label("For so many minutes").fill("30")
    model.get_by_role("button", name="Order").click()
    model.get_by_text("9 workers").wait_for()
    assert findings(opened) == []
    model.get_by_role("button", name="Let the load decide").click()
    until(opened, "!document.querySelector('.confirm')")
    assert server.plans == [{"model": "chat-8b", "workers": 9, "for_s": 1800}, {"model": "chat-8b"}]


def test_an_alert_leads_to_its_section_of_the_runbook(page, until, replay, findings) -> None:
    opened = page(replay().url + "/console#/alerts", width=390, height=844)
    opened.get_by_role("link", name="What to do").click()
    section = opened.get_by_role("complementary", name="TtftBurn")
    section.get_by_text("First tokens come later than promised").wait_for()
    assert section.locator("ol > li").count() == 3
    assert not findings(opened)
    section.get_by_role("link", name="UtilisationHigh").click()
    opened.get_by_role("complementary", name="UtilisationHigh").get_by_text(
        "A burst has nothing left"
    ).wait_for()
    opened.keyboard.press("Escape")
    until(opened, "location.hash === '#/alerts' && !document.querySelector('.drawer')")


def test_a_short_page_on_a_phone_begins_at_its_top(page, replay) -> None:
    opened = page(replay().url + "/console#/playground", width=390, height=844)
    title = opened.get_by_role("heading", name="Playground", exact=True)
    title.wait_for()
    assert title.bounding_box()["y"] < 120


def test_a_phone_has_every_page_behind_one_button(page, until, replay) -> None:
    opened = page(replay().url + "/console", width=390, height=844)
    opened.get_by_role("link", name="Fleet").wait_for()
    assert not opened.get_by_role("link", name="Rollouts").is_visible()
    opened.get_by_role("button", name="More").click()
    opened.get_by_role("link", name="Rollouts").click()
    opened.get_by_role("heading", name="Rollouts").wait_for()
    assert not opened.get_by_role("link", name="Costs").is_visible()
    assert opened.locator("nav button").inner_text() == "Rollouts"


def test_a_simulators_report_and_a_result_of_a_bench_open(page, until, replay, findings, tmp_path) -> None:
    run, compared, html = (tmp_path / name for name in ("run.json", "compared.json", "run.html"))
    small = ["steady", "--set", "seconds=20", "--set", "workers=1"]
    for path, more in (
        (run, ["--seeds", "2", "--html", str(html)]),
        (compared, ["--compare", "base", "workers=2"]),
    ):
        assert main(["simulate", *small, *more, "--json", str(path)]) in (0, 1)
    opened = page(replay(role="viewer").url + "/console#/reports")
    opened.get_by_label("Open a report").set_input_files(run)
    opened.get_by_role("heading", name="steady").wait_for()
    until(opened, "document.querySelectorAll('.charts .chart svg path').length === 8")
    plot = opened.locator(".plot").first
    plot.focus()
    plot.press("Home")
    assert re.match(r"0 s: came [\d.]+, met both promises", plot.get_attribute("aria-label"))
    opened.get_by_label("Seed").select_option(index=1)
    opened.get_by_text("Seed 2, hash").wait_for()
    assert findings(opened) == []
    opened.get_by_label("Open a report").set_input_files(compared)
    opened.get_by_role("columnheader", name="95 % interval").wait_for()
    opened.get_by_label("Open a report").set_input_files(max(RESULTS.glob("*-goodput-sim.json")))
    opened.get_by_label("Draw").select_option(label="goodput rps")
    assert opened.locator(".bars li").count() == opened.locator("tbody tr").count() > 5
    assert findings(opened) == []
    alone = page(f"file://{html}")
    alone.get_by_text("Seed 1, hash").wait_for()
    until(alone, "document.querySelectorAll('.charts .chart svg path').length === 8")
    assert findings(alone) == []
    (tmp_path / "broken.json").write_text("{")
    opened.get_by_label("Open a report").set_input_files(tmp_path / "broken.json")
    opened.get_by_text("broken.json cannot be opened").wait_for()
