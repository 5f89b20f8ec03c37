"""Where and with what a measurement was made: a figure without this cannot be compared with anything."""

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec

from penstock import __version__

PACKAGES = ("torch", "uvloop", "httptools", "msgspec", "tokenizers")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the versions on the client's side."""

    penstock: str
    python: str
    packages: dict[str, str]
    os: str
    cpu: str
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
