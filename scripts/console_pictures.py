"""The pictures of docs/console: `python scripts/console_pictures.py [NAME ...]` after the console has
changed. It needs what scripts/install_console.sh installs. The fleet is the drawn one of the tests.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from penstock.cli.main import main as simulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "doubles"))
from console_replay import Replay

VERSIONS = ("chat-8b@1", "chat-8b@2", "support@1", "support@2")
PICTURES = {
    "fleet": ("#/fleet", 12, (1320, 700), "light"),
    "map-dark": ("#/fleet/chat-70b-03", 64, (1440, 820), "dark"),
    "traffic": ("#/traffic", 12, (1320, 860), "light"),
    "request-dark": ("#/requests", 12, (1320, 860), "dark"),
    "capacity": ("#/capacity", 12, (1320, 980), "light"),
    "rollouts": ("#/rollouts", 12, (1320, 880), "light"),
    "alerts": ("#/alerts", 12, (1320, 880), "light"),
    "costs": ("#/costs", 12, (1320, 820), "light"),
    "phone": ("#/traffic", 12, (390, 844), "light"),
    "report": ("#/reports", 12, (1320, 980), "light"),
    "worker-dark": ("#/fleet/chat-70b-03", 12, (1440, 980), "dark"),
}


def report() -> Path:
    """A simulated run."""
    path = Path(tempfile.mkdtemp()) / "spike-20x.json"
    assert simulate(["simulate", "spike-20x", "--json", str(path)]) == 0
    return path


def main() -> None:
    """Take those that are named, or all of them."""
    names = sys.argv[1:] or list(PICTURES)
    target = ROOT / "docs" / "console"
    target.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in names:
            place, workers, (width, height), scheme = PICTURES[name]
            server = Replay(num_workers=workers, streams=40 * workers)
            if name == "rollouts":
                server.fleet.models += VERSIONS
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{server.url}/console{place}")
            page.wait_for_timeout(2500)
            if place == "#/requests":
                page.locator("tbody tr", has_text="stop").nth(3).locator("a").click()
                page.wait_for_timeout(1000)
            if place == "#/reports":
                page.set_input_files("input[type=file]", report())
                page.wait_for_timeout(1000)
            page.screenshot(path=target / f"{name}.png")
            page.close()
            server.stop()
        browser.close()


if __name__ == "__main__":
    main()
