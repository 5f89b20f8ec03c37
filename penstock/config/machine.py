"""This machine: which addresses only it can reach, where a user's state is kept between runs, and the cgroup
that memory is counted in.
"""

import functools
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

CACHED_MAX = 256


@functools.lru_cache(CACHED_MAX)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`.

    Asked for each request that shows no key.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """PENSTOCK_STATE_DIR, else what the XDG base directory specification says, for this user."""
    if chosen := environ.get("PENSTOCK_STATE_DIR"):
        return Path(chosen)
    base = environ.get("XDG_STATE_HOME")
    state = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    return state / "penstock"


class CgroupMemory:
    """The memory controller of a process's cgroup (version 2)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def of_self(
        cls, root: Path = Path("/sys/fs/cgroup"), self_file: Path = Path("/proc/self/cgroup")
    ) -> "CgroupMemory | None":
        """This process's; None where there is none."""
        try:
            lines = self_file.read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            if line.startswith("0::"):
                found = cls(root / line[3:].strip().lstrip("/"))
                return found if (found.directory / "memory.events").exists() else None
        return None

    def used_bytes(self) -> int:
        """Memory in use in it; 0 if that is not known."""
        return _number_in(self.directory / "memory.current")

    def limit_bytes(self) -> int:
        """The least of its limit and those of the cgroups that it is in; 0: there is none."""
        found, place = list[int](), self.directory
        while (file := place / "memory.max").exists():  # The root of all has none.
            found.append(_number_in(file))
            place = place.parent
        return min((each for each in found if each), default=0)

    def num_kills(self) -> int:
        """Processes that were killed for lack of memory since the cgroup was made; 0 if that is not known."""
        try:
            text = (self.directory / "memory.events").read_text()
        except OSError:
            return 0
        counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
        return int(counts.get("oom_kill", "0"))

    def is_own(self, pid: int) -> bool:
        """Whether no process but this one is in it."""
        try:
            return (self.directory / "cgroup.procs").read_text().split() == [str(pid)]
        except OSError:
            return False


def _number_in(path: Path) -> int:
    """0 where there is none: no such file, or "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
