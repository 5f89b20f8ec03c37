"""The console under load: long tasks in Chromium while a feed of many workers and streams is replayed, the
first paint, and what the feed costs the gateway.

    python bench/console.py [--workers 64] [--streams 10000] [--seconds 30] [--out FILE]

The browser's side is a drawn fleet (tests/doubles/console_replay.py): every second all workers change and 100
requests end. The gateway's side is the real feed over as many workers in this process, timed by its CPU:
making one event and writing it to `--watchers` streams. Needs what `scripts/install_console.sh` installs.
"""

import asyncio
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from harness import command_line, write_result
from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

from penstock.clock import SystemClock
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import LogConfig
from penstock.gateway.api.feed import Feed, ServerLine
from penstock.gateway.api.services import AllRequests, RecentRequests
from penstock.gateway.identity.tenants import OPERATOR
from penstock.protocol.fleet import FleetReport, ModelReport, WorkerReport
from penstock.telemetry.log import Log

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "doubles"))
from console_replay import Replay

PAGES = ("fleet", "fleet/chat-70b-03", "requests", "traffic", "capacity", "rollouts", "alerts")
WATCH = """
window.longTasks = [];
new PerformanceObserver(list => {
  for (const each of list.getEntries()) window.longTasks.push(each.duration);
}).observe({type: "longtask"});
"""


def browser_side(workers: int, streams: int, seconds: float) -> dict:
    """Each page for a while, and how long its longest task was."""
    server, found = Replay(num_workers=workers, streams=streams), {}
    server.warm_ticks = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for place in PAGES:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{server.url}/console#/{place}")
            page.wait_for_selector("h1")
            page.wait_for_timeout(3000)
            paint = page.evaluate(
                "performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)[0]"
            )
            page.evaluate(WATCH)
            before = page.evaluate("performance.now()")
            page.wait_for_timeout(seconds * 1000)
            tasks = page.evaluate("window.longTasks")
            found[place] = {
                "first_contentful_paint_ms": round(paint or 0),
                "seconds": round((page.evaluate("performance.now()") - before) / 1000, 1),
                "tasks_over_50_ms": len(tasks),
                "longest_task_ms": round(max(tasks, default=0)),
            }
            page.close()
        browser.close()
    server.stop()
    return found


class _Exchange:
    """Takes what is written, and counts it."""

    is_behind, on_disconnect = False, None

    def __init__(self) -> None:
        self.num_bytes = 0

    def begin_stream(self) -> None:
        """Nothing."""

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)

    def end(self) -> None:
        """Nothing."""


async def gateway_side(num_workers: int, num_watchers: int, ticks: int = 200) -> dict:
    """CPU of one second's event."""
    clock, tick = SystemClock(), 0

    async def look() -> tuple[ServerLine, FleetReport]:
        workers = [
            WorkerReport(
                id=f"worker-{i}", model="m", engine="penstock", state="ready", address="tcp:10.0.0.1:9000",
                identity="0" * 32, running=(i + tick) % 160, waiting=tick % 3,
                kv_blocks_used=(tick * 31) % 4096, kv_blocks_total=4096, generated_tokens=tick * 3000,
                age_s=0.2,
            )
            for i in range(num_workers)
        ]  # fmt: skip
        server = ServerLine(
            version="0", uptime_s=tick, connections=1, streams=1, processes=1, draining=False, auth=True
        )
        models = [ModelReport(name="m", waiting=0, ready=1, workers=1)]
        report = FleetReport(version="0", workers=workers, models=models)
        return server, report

    log = Log(LogConfig(), clock)
    recent = AllRequests(RecentRequests(clock), clock, None)
    feed = Feed(look, lambda _: None, recent, AdmissionConfig(), clock=clock, log=log)
    exchanges = [_Exchange() for _ in range(num_watchers)]
    for exchange in exchanges:
        feed.watch(exchange, OPERATOR, sees_requests=True)
    feed._task.cancel()
    times = []
    for tick in range(ticks):  # noqa: B007 - `look` sees it.
        before = time.process_time_ns()
        await feed._tick()
        times.append((time.process_time_ns() - before) / 1e6)
    feed.close()
    return {
        "workers": num_workers,
        "watchers": num_watchers,
        "cpu_ms_per_second_p50": round(statistics.median(times), 2),
        "cpu_ms_per_second_p95": round(statistics.quantiles(times, n=20)[-1], 2),
        "bytes_per_second_and_watcher": exchanges[0].num_bytes // ticks,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--watchers", type=int, default=4)
    args = parser.parse_args()
    result = {
        "gateway": asyncio.run(gateway_side(args.workers, args.watchers)),
        "browser": browser_side(args.workers, args.streams, args.seconds),
    }
    print(json.dumps(result, indent=1))
    write_result(args.json, result)


if __name__ == "__main__":
    main()
