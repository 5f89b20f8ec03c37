"""Runs the sections one after another, each in a process and a time limit of its own, and merges what they
wrote.

A section that fails, hangs or breaks the device is an error text in the JSON; the others go on. A section
writes what it has found whenever it has found something, so one that is stopped leaves the rest of its
figures.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.clock import SystemClock

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]
TOTAL_S = 520
"""Sections that would begin later than this do not begin. All their limits together fit in it, so that none
is cut short by those before it: what one does not use, nobody needs."""


@dataclass(frozen=True)
class Section:
    """A module's `run`, and the seconds it may take."""

    name: str
    module: str
    limit_s: int
    arguments: tuple[str, ...] = ()


SECTIONS = (
    Section("ceilings", "ceilings", 15),
    Section("kernels", "kernels", 50),
    Section("correctness", "correctness", 85),
    Section("quantized", "quantized", 120),
    Section("formats", "formats", 80),
    Section("qwen3-0.6b", "models", 45, ("qwen3-0.6b",)),
    Section("llama-3-8b", "models", 50, ("llama-3-8b",)),
    Section("llama-3-8b int4", "models", 50, ("llama-3-8b", "int4")),
    Section("llama-3-8b int8", "models", 50, ("llama-3-8b", "int8")),
    Section("llama-3-8b fp8", "models", 50, ("llama-3-8b", "fp8")),
    Section("llama-3-8b fp8 in blocks", "models", 50, ("llama-3-8b", "fp8-block")),
    Section("llama-3-8b int4 + fp8 KV", "models", 50, ("llama-3-8b", "int4", "fp8")),
    Section("qwen3-14b", "models", 60, ("qwen3-14b",)),
    Section("throughput", "throughput", 40),
    Section("serving", "serving", 150),
)


def main() -> int:
    options = parse()
    if options.section:
        run_section(next(one for one in SECTIONS if one.name == options.section), options)
        return 0
    wanted = options.sections.split(",") if options.sections else [one.name for one in SECTIONS]
    results = run_all([one for one in SECTIONS if one.name in wanted], options)
    print(summary(results), flush=True)
    return int(any("error" in results["sections"][name] for name in results["sections"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="", help="some of: " + ",".join(one.name for one in SECTIONS))
    default = os.environ.get("OUT") or str(ROOT / "docs" / "results")
    parser.add_argument("--out", type=Path, default=Path(default), help="directory of the JSON")
    parser.add_argument(
        "--cpu", action="store_true", help="the kernels' twins on the CPU: to test this script"
    )
    parser.add_argument("--tiny", action="store_true", help="shapes of a few thousand parameters")
    parser.add_argument("--in-process", action="store_true", help="no process per section")
    parser.add_argument("--section", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(sections: list[Section], options: argparse.Namespace) -> dict[str, Any]:
    started_ns = CLOCK.now_ns()
    options.out.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.fromtimestamp(CLOCK.wall_ns() / 1e9, datetime.UTC).date().isoformat()
    path = options.out / f"{day}-gpu.json"
    results: dict[str, Any] = {
        "schema": "penstock.gpu/1",
        "cpu": options.cpu,
        "tiny": options.tiny,
        "sections": {},
    }
    for section in sections:
        gone_s = (CLOCK.now_ns() - started_ns) / 1e9
        print(f"[{gone_s:5.0f} s] {section.name}", flush=True)
        limit_s = min(section.limit_s, TOTAL_S - gone_s)
        if limit_s < 5:
            found: dict[str, Any] = {"error": "not begun: the time is used up"}
        elif options.in_process:
            found = run_section(section, options)
            part_of(section, options.out).unlink()
        else:
            found = in_a_process(section, options, limit_s)
        results["sections"][section.name] = found
        results["seconds"] = round((CLOCK.now_ns() - started_ns) / 1e9, 1)
        path.write_text(json.dumps(results, indent=1) + "\n")
        for name, value in found.items():
            print(f"    {name}: {json.dumps(value)}"[:400], flush=True)
    print(path, flush=True)
    return results


def run_section(section: Section, options: argparse.Namespace) -> dict[str, Any]:
    """Run a section here; what it finds is in its file at any time."""
    from bench.gpu.common import (
        Bench,
        Report,
    )  # With torch, which the process that only starts others can do without.

    bench, report = Bench(cpu=options.cpu, tiny=options.tiny), Report(part_of(section, options.out))
    started_ns = CLOCK.now_ns()
    try:
        importlib.import_module(f"bench.gpu.{section.module}").run(bench, report, *section.arguments)
    except Exception as error:  # noqa: BLE001 Whatever it is, the other sections go on.
        report.put("error", f"{type(error).__name__}: {error}"[:2000])
        report.put("traceback", traceback.format_exc()[-4000:])
    report.put("seconds", round((CLOCK.now_ns() - started_ns) / 1e9, 1))
    return report.found


def in_a_process(section: Section, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    flags = [flag for flag, on in (("--cpu", options.cpu), ("--tiny", options.tiny)) if on]
    command = [
        sys.executable,
        "-m",
        "bench.gpu.main",
        "--section",
        section.name,
        "--out",
        str(options.out),
        *flags,
    ]
    part = part_of(section, options.out)
    part.unlink(missing_ok=True)
    why = ""
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True, cwd=ROOT)
    try:
        code = process.wait(limit_s)
        why = f"the process ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"stopped after {limit_s:.0f} s"
    finally:
        stop(process)
    found = json.loads(part.read_text()) if part.exists() else {}
    part.unlink(missing_ok=True)
    return {**found, "error": why} if why and "error" not in found else found


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a section and every server that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def part_of(section: Section, out: Path) -> Path:
    return out / f".gpu-{section.name.replace(' ', '-')}.json"


def summary(results: dict[str, Any]) -> str:
    lines = ["", f"{'section':14} {'seconds':>8}  outcome"]
    for name, found in results["sections"].items():
        outcome = found.get("error", "").splitlines()[0] if "error" in found else found.get("summary", "done")
        lines.append(f"{name:14} {found.get('seconds', 0):8.1f}  {outcome}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
