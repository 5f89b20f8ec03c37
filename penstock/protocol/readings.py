"""What a worker's machine says of itself; part of `protocol/worker.py`."""

import msgspec


class GpuReadings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a GPU says of itself; None: it does not."""

    index: int
    """As the driver counts."""
    util: int | None = None
    """Percent of the time in which a kernel ran."""
    memory_util: int | None = None
    """Percent of the time in which its memory was read or written."""
    used_mib: int | None = None
    free_mib: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    xid: int | None = None
    """Of the last error that the driver told of; 0: there was none."""


class DeviceReadings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker's process takes of its machine, and its GPU if it has one."""

    rss_bytes: int = 0
    cpu_ms: int = 0
    cgroup_bytes: int = 0
    """Memory of all processes in its cgroup, and the most that they may have; 0: not told, no limit."""
    cgroup_limit_bytes: int = 0
    load: float = 0.0
    """Of its machine over a minute, per core."""
    gpu: GpuReadings | None = None
