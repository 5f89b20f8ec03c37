"""Where, when and with what a figure was measured: what every result file of bench/ says of itself.

    write_result(path, {"rounds": ...})        one JSON object: {"measured": {...}, "rounds": ...}

A plain build of Python costs about a fifth more CPU than one with profile-guided and link-time optimization,
so the file says which it was.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.bench.report import read_environment

REPOSITORY = Path(__file__).resolve().parents[1]
LIST_PACKAGES = (
    "import importlib.metadata, json, sys; "
    "print(json.dumps({d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}))"
)


def measured(versions: Mapping[str, str] | None = None) -> dict[str, object]:
    """The command, the machine, its load, Python and how it was built, our commit; `versions` of what else
    took part.
    """
    return {
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "commit": commit(),
        **msgspec.to_builtins(read_environment()),
        "python_build": python_build(),
        **({"versions": dict(versions)} if versions is not None else {}),
    }


def python_build(
    config: str = str(sysconfig.get_config_var("CONFIG_ARGS") or ""),
    flags: str = " ".join(
        str(sysconfig.get_config_var(name) or "") for name in ("PY_CFLAGS", "PY_CORE_CFLAGS")
    ),
) -> str:
    """How this interpreter was compiled: "plain", "PGO", "LTO" or "PGO+LTO"."""
    optimized = "--enable-optimizations" in config or "-fprofile-use" in flags
    linked = "--with-lto" in config or "-flto" in flags
    return "+".join(name for name, is_so in (("PGO", optimized), ("LTO", linked)) if is_so) or "plain"


def commit() -> str:
    """The commit that is checked out, with "+" if files differ from it; empty outside a repository."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def installed(venv: Path, packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of `packages` that an environment has."""
    try:
        done = subprocess.run(
            [str(venv / "bin/python"), "-c", LIST_PACKAGES], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = json.loads(done.stdout)
    return {name: found[name] for name in packages if name in found}


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give the command line `--json FILE`, also called `--out`; `args.json` is a path or None."""
    parser.add_argument(
        "--json", "--out", type=Path, dest="json", metavar="FILE", help="write the figures here"
    )


def write_result(
    path: Path | None, result: Mapping[str, object], versions: Mapping[str, str] | None = None
) -> None:
    """Write a result with what it was measured with in front; without a path nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"measured": measured(versions), **result}, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
