"""The report of a run: a JSON document (`docs/bench.md` describes it) and a table for people.

Latencies are milliseconds. Every field of `Report` is part of the schema `penstock.bench/1`;
fields may be added, never changed in meaning.

Where and with what a measurement was made: a figure without this cannot be compared with anything.
"""

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec
from rich.table import Table

from penstock import __version__
from penstock.bench.load import Distribution, Level, LoadRun
from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.engine.native.presence import kernels_here

PACKAGES = ("torch", "uvloop", "httptools", "msgspec", "tokenizers")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the versions on the client's side."""

    penstock: str
    python: str
    packages: dict[str, str]
    os: str
    cpu: str
    kernels: str = ""
    """The kernels that an engine of ours computes with on this machine, unless its settings say otherwise."""
    cpus_usable: int
    memory_bytes: int


def read_environment() -> Environment:
    """Describe this machine."""
    return Environment(
        penstock=__version__,
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := installed_version(name))},
        os=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        kernels=str(kernels_here()),
        cpus_usable=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def installed_version(package: str) -> str:
    """The version of an installed distribution, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def cpu_info() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def cpu_name() -> str:
    """The processor as people call it."""
    return cpu_info().get("model name") or platform.machine() or "unknown"


SCHEMA = "penstock.bench/1"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the run."""

    seed: int
    prompt_tokens: int
    shared_prefix_tokens: int
    output_tokens: int
    temperature: float
    ignore_eos: bool
    dataset: str | None = None
    ttft_promise_ms: float = 0.0
    """The promise that a good request keeps; 0: no bound."""
    tpot_promise_ms: float = 0.0


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load level. Distributions are over successful requests; `itl_ms` over gaps between chunks."""

    name: str
    mode: str
    """"closed" (fixed concurrency) or "open" (Poisson arrivals at `rate`)."""
    concurrency: int | None
    rate: float | None
    duration_s: float
    """From the first send to the last answer."""
    requests_ok: int
    requests_failed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_counted_by: str
    """"usage" (the server's own count) or "chunks" (it reports none)."""
    requests_per_s: float
    output_tokens_per_s: float
    requests_good: int
    """Of `requests_ok`, those that kept both promises."""
    good_share: float
    """`requests_good` over all that ended, failed ones included."""
    goodput_requests_per_s: float
    """Good requests over `duration_s`."""
    goodput_tokens_per_s: float
    """Output tokens of the good ones over `duration_s`."""
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    send_delay_ms: Distribution
    """How late requests left the client; large values mean that the client was the bottleneck."""
    interrupted: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    schema: str
    started_at: str
    """UTC, ISO 8601."""
    url: str
    model: str
    settings: Settings
    environment: Environment
    levels: tuple[LevelReport, ...]


def utc_stamp(wall_ns: int) -> str:
    """A wall-clock time as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).isoformat()


def level_report(level: Level, run: LoadRun, *, interrupted: bool = False) -> LevelReport:
    """Sum up a finished (or interrupted) level."""
    tally, elapsed_s = run.tally, max(run.elapsed_s, 1e-9)
    return LevelReport(
        name=level.name,
        mode="open" if level.rate is not None else "closed",
        concurrency=level.concurrency,
        rate=level.rate,
        duration_s=elapsed_s,
        requests_ok=tally.ok,
        requests_failed=tally.failed,
        errors=tally.errors,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        tokens_counted_by="usage" if tally.tokens_from_usage else "chunks",
        requests_per_s=tally.ok / elapsed_s,
        output_tokens_per_s=tally.output_tokens / elapsed_s,
        requests_good=tally.good,
        good_share=tally.good / max(1, tally.ended),
        goodput_requests_per_s=tally.good / elapsed_s,
        goodput_tokens_per_s=tally.good_tokens / elapsed_s,
        ttft_ms=tally.ttft.summary(divisor=NS_PER_MS),
        tpot_ms=tally.tpot.summary(divisor=NS_PER_MS),
        itl_ms=tally.itl.summary(divisor=NS_PER_MS),
        e2e_ms=tally.e2e.summary(divisor=NS_PER_MS),
        send_delay_ms=tally.send_delay.summary(divisor=NS_PER_MS),
        interrupted=interrupted,
    )


def to_json(report: Report) -> bytes:
    """The document, indented, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _spread(distribution: Distribution) -> list[str]:
    return [_ms(distribution.p50), _ms(distribution.p90), _ms(distribution.p95), _ms(distribution.p99)]


def throughput_table(report: Report) -> Table:
    """One row per level: how much."""
    table = Table(title=f"{report.model} at {report.url}", title_justify="left", title_style="bold")
    for name in ("load", "ok", "failed", "seconds", "req/s", "output tok/s", "prompt", "cached", "output"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for level in report.levels:
        requests = max(1, level.requests_ok)
        table.add_row(
            level.name,
            f"{level.requests_ok:,}",
            f"{level.requests_failed:,}",
            f"{level.duration_s:.1f}",
            f"{level.requests_per_s:.2f}",
            f"{level.output_tokens_per_s:,.1f}",
            f"{level.prompt_tokens / requests:.0f}",
            f"{level.cached_tokens / requests:.0f}",
            f"{level.output_tokens / requests:.0f}",
        )
    table.caption, table.caption_justify = "prompt, cached and output: tokens per request", "left"
    return table


def goodput_heading(asked: Settings) -> str:
    """The heading over the table of goodput."""
    bounds = [
        f"{name} within {limit:g} ms"
        for name, limit in (("TTFT", asked.ttft_promise_ms), ("TPOT", asked.tpot_promise_ms))
        if limit
    ]
    return f"Goodput: {' and '.join(bounds) or 'all answers, since nothing is promised'}"


def goodput_table(report: Report) -> Table:
    """One row per level: how much of it in time."""
    table = Table()
    for name in ("load", "good", "of all", "req/s", "output tok/s"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for level in report.levels:
        table.add_row(
            level.name,
            f"{level.requests_good:,}",
            f"{level.good_share:.0%}",
            f"{level.goodput_requests_per_s:.2f}",
            f"{level.goodput_tokens_per_s:,.1f}",
        )
    return table


def latency_table(report: Report) -> Table:
    """Four rows per level: how fast."""
    table = Table(title="Latency in milliseconds", title_justify="left", title_style="bold")
    table.add_column("load")
    table.add_column("")
    for name in ("p50", "p90", "p95", "p99", "mean", "max"):
        table.add_column(name, justify="right")
    for level in report.levels:
        rows = (
            ("TTFT", level.ttft_ms),
            ("TPOT", level.tpot_ms),
            ("ITL", level.itl_ms),
            ("end to end", level.e2e_ms),
        )
        for place, (name, shown) in enumerate(rows):
            head = level.name if place == 0 else ""
            last = place == len(rows) - 1
            table.add_row(head, name, *_spread(shown), _ms(shown.mean), _ms(shown.max), end_section=last)
    return table
