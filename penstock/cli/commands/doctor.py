"""`penstock doctor`: what works on this machine, what does not, and what to do about it.

Each check looks at one thing and says what it found; none raises.
"""

import argparse
import enum
import errno
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from penstock import __version__
from penstock.bench.report import cpu_info, cpu_name, installed_version
from penstock.cli import console
from penstock.cli.commands.probe import TorchFacts
from penstock.cli.flags import Commands, Help, default_port, number
from penstock.cli.python_build import python_advice, python_build
from penstock.config.checkpoints import DEMO_MODELS, resolve
from penstock.errors import CheckpointError, ConfigError, OperatorError
from penstock.gateway.http.terms import WIRE_LIMITS, WireLimits
from penstock.models.registry import check_loads, read_spec
from penstock.models.vectors import stored_encoder
from penstock.text.tokenizer import Tokenizer
from penstock.weight_cache.fetch import machine_cache

PROBE_TIMEOUT_S = 120
MEMORY_WARN_BYTES = 2 << 30
BFLOAT16_FAST = 1.2
"""bfloat16 counts as fast when a matrix product takes at most 1/1.2 of the time in float32."""
NEEDED = (
    "httptools",
    "jinja2",
    "msgspec",
    "pyyaml",
    "rich",
    "shtab",
    "tokenizers",
    "uvloop",
)
ENGINE = ("llguidance", "numpy", "psutil", "safetensors")
"""Beside torch, which is asked more."""


class CheckState(enum.StrEnum):
    """How a check went. Only FAIL keeps `serve` from working."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class DoctorCheck(msgspec.Struct, frozen=True):
    """The result of one check. `hint` says what to do; empty if there is nothing to do."""

    name: str
    state: CheckState
    detail: str
    hint: str = ""


def run_all(port: int, model: str | None = None) -> tuple[DoctorCheck, ...]:
    """Every check, in the order in which they are shown; the last is of `model`, if one is named."""
    of_model = (check_model(model),) if model is not None else ()
    return (
        check_python(),
        check_os(),
        check_cpu(),
        check_cpu_features(),
        check_memory(),
        check_packages("packages", NEEDED, "pip install penstock"),
        *check_torch(),
        check_packages("engine packages", ENGINE, "pip install 'penstock[engine]'"),
        check_native(),
        check_weight_cache(),
        check_demo_models(),
        check_port(port),
        check_temp(),
        check_open_files(WIRE_LIMITS),
        *of_model,
    )


def check_python() -> DoctorCheck:
    """Python is 3.11 or newer, and not known to have been built slow."""
    detail, build = f"{platform.python_version()} ({sys.executable})", python_build()
    if not sys.version_info >= (3, 11):
        return DoctorCheck("Python", CheckState.FAIL, detail, "Python 3.11 or newer is needed")
    if advice := python_advice(build):
        return DoctorCheck("Python", CheckState.NOTE, detail, advice)
    return DoctorCheck("Python", CheckState.OK, f"{detail}, {build}" if build else detail)


def check_os() -> DoctorCheck:
    """Linux is what we test on."""
    good = sys.platform == "linux"
    hint = "" if good else "only Linux is tested"
    detail = f"{platform.system()} {platform.release()} {platform.machine()}"
    return DoctorCheck("system", CheckState.OK if good else CheckState.WARN, detail, hint)


def check_cpu() -> DoctorCheck:
    """How many cores this process may use."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{cpu_name()}, {usable} of {total} cores usable"
    quota = _cpu_quota()
    if quota is not None and quota < usable:
        return DoctorCheck(
            "CPU",
            CheckState.WARN,
            f"{detail}, limited to {quota:g} by the container",
            f"use --threads {max(1, int(quota))}",
        )
    return DoctorCheck("CPU", CheckState.OK, detail)


def _cpu_quota() -> float | None:
    """Cores that the control group allows (cgroup v2); None if it does not say."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def check_cpu_features() -> DoctorCheck:
    """Which vector instructions torch can use."""
    flags = set(cpu_info().get("flags", "").split())
    if not flags:
        return DoctorCheck("CPU features", CheckState.NOTE, "unknown on this system")
    wanted = {
        "avx2": "avx2",
        "avx512f": "avx512",
        "avx512_vnni": "avx512-vnni",
        "avx512_bf16": "avx512-bf16",
        "amx_bf16": "amx-bf16",
        "amx_int8": "amx-int8",
    }
    have = [name for flag, name in wanted.items() if flag in flags]
    lack = [name for flag, name in wanted.items() if flag not in flags]
    detail = (", ".join(have) or "none") + (f" (not: {', '.join(lack)})" if lack else "")
    if "avx2" in flags:
        return DoctorCheck("CPU features", CheckState.OK, detail)
    return DoctorCheck("CPU features", CheckState.WARN, detail, "without avx2 models run slowly")


def check_memory() -> DoctorCheck:
    """Memory that a model could take now."""
    try:
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return DoctorCheck("memory", CheckState.NOTE, "unknown on this system")
    detail = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < MEMORY_WARN_BYTES:
        return DoctorCheck("memory", CheckState.WARN, detail, "only small models fit")
    return DoctorCheck("memory", CheckState.OK, detail)


def check_packages(name: str, packages: Sequence[str], remedy: str) -> DoctorCheck:
    """These distributions are installed."""
    versions = {package: installed_version(package) for package in packages}
    if missing := [package for package, version in versions.items() if not version]:
        return DoctorCheck(name, CheckState.FAIL, f"missing: {', '.join(missing)}", remedy)
    return DoctorCheck(
        name, CheckState.OK, ", ".join(f"{package} {version}" for package, version in versions.items())
    )


def check_torch() -> tuple[DoctorCheck, ...]:
    """Torch imports and computes, how fast bfloat16 is, and whether there is a GPU."""
    if not installed_version("torch"):
        return (DoctorCheck("torch", CheckState.FAIL, "not installed", "pip install 'penstock[engine]'"),)
    facts = probe_torch()
    if isinstance(facts, str):
        return (
            DoctorCheck("torch", CheckState.FAIL, facts, "install a torch build that fits this processor"),
        )
    return (
        DoctorCheck("torch", CheckState.OK, f"{facts.version}, {facts.threads} threads"),
        _check_bfloat16(facts),
        _check_gpu(facts),
    )


def probe_torch() -> TorchFacts | str:
    """Run the torch probe in a process of its own; the string says how it failed."""
    command = [sys.executable, "-m", "penstock.cli.commands.probe"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be tried: {error}"
    if done.returncode < 0:
        return f"installed, but dies with signal {-done.returncode}"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"installed, but does not work: {last}"
    try:
        return msgspec.json.decode(done.stdout, type=TorchFacts)
    except msgspec.DecodeError as error:
        return f"the probe's answer cannot be read: {error}"


def _check_bfloat16(facts: TorchFacts) -> DoctorCheck:
    detail = f"{facts.bfloat16_speedup:.1f}x the speed of float32 in a matrix product"
    if facts.bfloat16_speedup >= BFLOAT16_FAST:
        return DoctorCheck("bfloat16", CheckState.OK, detail)
    return DoctorCheck("bfloat16", CheckState.NOTE, detail + ": torch computes in float32 here")


def _check_gpu(facts: TorchFacts) -> DoctorCheck:
    if facts.gpus:
        return DoctorCheck("GPU", CheckState.OK, f"{', '.join(facts.gpus)} (CUDA {facts.cuda_build})")
    if Path("/proc/driver/nvidia/version").exists():
        hint = "" if facts.cuda_build else "install a torch build with CUDA"
        return DoctorCheck("GPU", CheckState.WARN, "there is an NVIDIA driver, but torch sees no GPU", hint)
    return DoctorCheck("GPU", CheckState.NOTE, "none; models run on the CPU")


def check_native() -> DoctorCheck:
    """Our own compiled kernels: which instruction set they use here, and which types of weights they
    compute.
    """
    from penstock.engine.native import NativeLibrary  # Only doctor pays for loading them.
    from penstock.engine.native.library import Type
    from penstock.engine.native.presence import kernels_here

    here = kernels_here()
    if not here.isa:
        detail = f"none, so {here}: {here.why}"
        return DoctorCheck("native kernels", CheckState.NOTE, detail, f"for compiled kernels: {here.remedy}")
    kernels = NativeLibrary()
    types = {"float32": Type.F32, "bfloat16": Type.BF16, "int8": Type.I8, "int4": Type.I4}
    weights = ", ".join(name for name, kind in types.items() if kernels.supports(kind))
    return DoctorCheck("native kernels", CheckState.OK, f"{here.isa}; weights in {weights}")


def check_weight_cache() -> DoctorCheck:
    """Where models of the hub and of object storage are kept."""
    name = "weight cache"
    try:
        cache = machine_cache()
        entries = cache.entries()
    except (ConfigError, OSError) as error:
        return DoctorCheck(name, CheckState.WARN, str(error), "see `penstock cache --help`")
    held = sum(entry.num_bytes for entry in entries)
    bound = f" of {cache.bytes_max / 1e9:.1f}" if cache.bytes_max else ""
    return DoctorCheck(
        name, CheckState.OK, f"{cache.place}: models: {len(entries)}, {held / 1e9:.1f}{bound} GB"
    )


def check_demo_models() -> DoctorCheck:
    """The models that come with the project; the first is what `penstock serve` serves without a name."""
    lack: dict[str, str] = {}
    for name in DEMO_MODELS:
        try:
            resolve(name)
        except OperatorError as error:
            lack[name] = str(error)
    if not lack:
        return DoctorCheck("demo models", CheckState.OK, ", ".join(DEMO_MODELS))
    state = CheckState.FAIL if DEMO_MODELS[0] in lack else CheckState.WARN
    return DoctorCheck("demo models", state, next(iter(lack.values())))


def check_port(port: int) -> DoctorCheck:
    """The port that `serve` would take is free."""
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            detail = "in use (perhaps by a running server)" if taken else str(error.strerror)
            return DoctorCheck(name, CheckState.WARN, detail, "take another one with --port or PENSTOCK_PORT")
    return DoctorCheck(name, CheckState.OK, "free")


def check_model(model: str) -> DoctorCheck:
    """Our engine has an architecture for the model, and its files are of a form that it reads.

    Loads no weights.
    """
    name = f"model {model}"
    try:
        directory = resolve(model)
        check_loads(directory)
        encoder = stored_encoder(directory)
        spec = read_spec(directory)[0] if encoder is None else encoder[0]
        Tokenizer.load(directory)
    except (ConfigError, CheckpointError) as error:
        return DoctorCheck(name, CheckState.FAIL, str(error), "penstock serve would say the same")
    return DoctorCheck(
        name, CheckState.OK, f"{spec.num_layers} layers of {spec.hidden_size}, vocabulary {spec.vocab_size}"
    )


def check_temp() -> DoctorCheck:
    """Workers talk over sockets in the temporary directory."""
    directory = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(prefix="penstock-"):
            pass
    except OSError as error:
        return DoctorCheck(
            "temporary files",
            CheckState.FAIL,
            f"{directory}: {error.strerror}",
            "set TMPDIR to a writable directory",
        )
    return DoctorCheck("temporary files", CheckState.OK, f"{directory} is writable")


def check_open_files(limits: WireLimits) -> DoctorCheck:
    """As many open files are allowed as a server with all its connections has. It raises the soft limit by
    itself, up to the hard one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return DoctorCheck("open files", CheckState.OK, "no limit")
    if hard >= limits.open_files:
        return DoctorCheck("open files", CheckState.OK, f"{hard} are allowed")
    detail = (
        f"{hard} are allowed (ulimit -Hn); {limits.connections_max} connections and the server's own files "
        f"need {limits.open_files}"
    )
    return DoctorCheck(
        "open files", CheckState.WARN, detail, "raise the hard limit, or expect fewer connections"
    )


EPILOG = """\
exit code:
  0  `penstock serve` can work here (there may be warnings)
  1  something that it needs is missing

examples:
  penstock doctor
  penstock doctor ./my-model
  penstock doctor --json | jq '.checks[] | select(.state != "ok")'"""

_MARKS = {
    CheckState.OK: ("ok", "green"),
    CheckState.NOTE: ("-", "dim"),
    CheckState.WARN: ("warn", "yellow"),
    CheckState.FAIL: ("FAIL", "red"),
}


class Diagnosis(msgspec.Struct, frozen=True):
    """The document that --json prints."""

    penstock: str
    can_serve: bool
    checks: tuple[DoctorCheck, ...]


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "doctor",
        help="say what works on this machine, and why not",
        description="Say what works on this machine for serving models, what does not, and what to do about "
        "it.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model directory, hub id or demo model: say whether our engine could load it, without loading "
        "it",
    )
    parser.add_argument(
        "--port",
        type=number(int, 0, 65_535),
        metavar="N",
        help="port to look at (default: PENSTOCK_PORT or 8000)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock doctor`."""
    port = default_port() if args.port is None else args.port
    screen = console.err()
    if screen.is_terminal and not args.json:
        with screen.status("looking around"):
            found = run_all(port, args.model)
    else:
        found = run_all(port, args.model)
    diagnosis = Diagnosis(__version__, all(check.state != CheckState.FAIL for check in found), found)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n")
    else:
        _show(diagnosis)
    return 0 if diagnosis.can_serve else 1


def _show(diagnosis: Diagnosis) -> None:
    screen = console.out()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in diagnosis.checks:
        mark, style = _MARKS[check.state]
        hint = f"\n-> {check.hint}" if check.hint else ""
        table.add_row(f"[{style}]{mark}[/]", check.name, check.detail + hint)
    screen.print(table)
    verdict = "penstock serve can work here" if diagnosis.can_serve else "penstock serve cannot work here yet"
    screen.print(
        f"\npenstock {diagnosis.penstock}: {verdict}", style="bold" if diagnosis.can_serve else "bold red"
    )
