"""What can one GPU tell? Checks, kernels, models and serving, section by section, in one JSON.

Sections run one after another, each in a process and a time limit of its own; what they wrote is merged.
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
from pathlib import Path
from typing import Any, NamedTuple

from penstock.clock import SystemClock

CLOCK = SystemClock()
REPOSITORY = Path(__file__).parents[2]
TOTAL_S = 520
"""They take less than their limits as a rule; what would begin later than this is left out and says so."""


class Section(NamedTuple):
    """A function of a module, and the seconds that it may take."""

    limit_s: int
    function: str
    arguments: tuple[str, ...] = ()


SECTIONS = {
    "ceilings": Section(15, "models.ceilings"),
    "kernels": Section(50, "kernels.run"),
    "correctness": Section(85, "correctness.run", ("families",)),
    "quantized": Section(60, "kernels.run_quantized"),
    "formats": Section(60, "correctness.run", ("forms",)),
    "qwen3-0.6b": Section(45, "models.run", ("qwen3-0.6b",)),
    "llama-3-8b": Section(50, "models.run", ("llama-3-8b",)),
    "llama-3-8b int4": Section(50, "models.run", ("llama-3-8b", "int4")),
    "llama-3-8b int8": Section(50, "models.run", ("llama-3-8b", "int8")),
    "llama-3-8b fp8": Section(50, "models.run", ("llama-3-8b", "fp8")),
    "llama-3-8b fp8 in blocks": Section(50, "models.run", ("llama-3-8b", "fp8-block")),
    "llama-3-8b int4 + fp8 KV": Section(50, "models.run", ("llama-3-8b", "int4", "fp8")),
    "qwen3-14b": Section(60, "models.run", ("qwen3-14b",)),
    "throughput": Section(60, "throughput.run"),
    "serving": Section(150, "serving.run"),
}


def main() -> int:
    options = parse()
    if options.section:
        run_section(options.section, options)
        return 0
    wanted = options.sections.split(",") if options.sections else list(SECTIONS)
    found = run_all([name for name in SECTIONS if name in wanted], options)
    for name, one in found.items():
        outcome = str(one.get("error", one.get("summary", "done"))).splitlines()[0]
        print(f"{name:24} {one.get('seconds', 0):6.1f} s  {outcome}", flush=True)
    return int(any("error" in one for one in found.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="", help="some of: " + ",".join(SECTIONS))
    default = os.environ.get("OUT") or str(REPOSITORY / "docs" / "results")
    parser.add_argument("--out", type=Path, default=Path(default), help="directory of the JSON")
    parser.add_argument(
        "--cpu", action="store_true", help="the kernels' twins on the CPU: to test this script"
    )
    parser.add_argument("--tiny", action="store_true", help="shapes of a few thousand parameters")
    parser.add_argument("--in-process", action="store_true", help="no process per section")
    parser.add_argument("--section", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    started_ns, sections = CLOCK.now_ns(), dict[str, dict[str, Any]]()
    options.out.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.fromtimestamp(CLOCK.wall_ns() / 1e9, datetime.UTC).date().isoformat()
    path = options.out / f"{day}-gpu.json"
    for name in names:
        gone_s = (CLOCK.now_ns() - started_ns) / 1e9
        print(f"[{gone_s:5.0f} s] {name}", flush=True)
        limit_s = min(SECTIONS[name].limit_s, TOTAL_S - gone_s)
        if limit_s < 5:
            sections[name] = {"error": "not begun: the time is used up"}
        elif options.in_process:
            sections[name] = run_section(name, options)
            part_of(name, options.out).unlink()
        else:
            sections[name] = in_a_process(name, options, limit_s)
        seconds = round((CLOCK.now_ns() - started_ns) / 1e9, 1)
        result = {"schema": "penstock.gpu/1", "cpu": options.cpu, "tiny": options.tiny, "seconds": seconds}
        path.write_text(json.dumps({**result, "sections": sections}, indent=1) + "\n")
        for figure, value in sections[name].items():
            print(f"    {figure}: {json.dumps(value)}"[:400], flush=True)
    print(path, flush=True)
    return sections


def run_section(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a section here; what it finds is in its file at any time."""
    # With torch, which the process that only starts others can do without.
    from bench.gpu.common import Bench, Report

    bench, report = Bench(cpu=options.cpu, tiny=options.tiny), Report(part_of(name, options.out))
    started_ns, (module, _, function) = CLOCK.now_ns(), SECTIONS[name].function.partition(".")
    try:
        section = getattr(importlib.import_module(f"bench.gpu.{module}"), function)
        section(bench, report, *SECTIONS[name].arguments)
    except Exception as error:  # noqa: BLE001 Whatever it is, the other sections go on.
        report.put("error", f"{type(error).__name__}: {error}"[:2000])
        report.put("traceback", traceback.format_exc()[-4000:])
    report.put("seconds", round((CLOCK.now_ns() - started_ns) / 1e9, 1))
    return report.found


def in_a_process(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    flags = [flag for flag, on in (("--cpu", options.cpu), ("--tiny", options.tiny)) if on]
    own = ["--section", name, "--out", str(options.out), *flags]
    part, why = part_of(name, options.out), ""
    part.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.main", *own], stdout=sys.stderr, start_new_session=True,
        cwd=REPOSITORY,
    )  # fmt: skip
    try:
        code = process.wait(limit_s)
        why = f"the process ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"stopped after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # With every server that it started.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads(part.read_text()) if part.exists() else {}
    part.unlink(missing_ok=True)
    return {**found, "error": why} if why and "error" not in found else found


def part_of(name: str, out: Path) -> Path:
    return out / f".gpu-{name.replace(' ', '-')}.json"


if __name__ == "__main__":
    sys.exit(main())
