"""A Chromium, driven by Playwright, in front of a replayed fleet or a real gateway."""

import shutil
from pathlib import Path

import pytest
from console_replay import Replay

AXE = Path(__file__).parents[2] / "console" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "scripts/install_console.sh installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def replay():
    made = []

    def make(**kinds):
        made.append(Replay(**kinds))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def page(browser):
    """Opens pages, and fails for whatever one of them throws or is denied."""
    contexts, wrong = [], []

    def open_at(url, *, width=1320, height=860, dark=False):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        opened = context.new_page()
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda message: wrong.append(message.text) if _is_wrong(message) else None)
        opened.goto(url)
        return opened

    yield open_at
    for context in contexts:
        context.close()
    assert not wrong


def _is_wrong(message) -> bool:
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


@pytest.fixture
def until():
    """Waits for what a page says to be true. (Playwright's own wait evaluates strings in the page, which its
    policy forbids.)
    """

    def wait(page, expression, arg=None):
        for _ in range(1000):
            if page.evaluate(expression, arg):
                return
            page.wait_for_timeout(20)
        raise AssertionError(f"never true: {expression}")

    return wait


@pytest.fixture
def findings():
    """What axe-core finds serious on a page."""

    def look(page):
        # The page's policy admits no script but its own: this one comes by the debugger.
        page.evaluate(AXE.read_text() + "; 0")
        reported = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
            for each in reported["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    return look
