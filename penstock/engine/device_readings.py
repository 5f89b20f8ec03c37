"""The readings of a worker's device and its machine: NVML's numbers of its GPU, and the kernel's of its
process and its cgroup. Read every few seconds on a thread of its own, since a driver may be slow to answer.

NVML is the driver's own library, loaded by name: without it there is no GPU to read. A reading that the
device does not support is left out.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config.machine import CgroupMemory
from penstock.protocol.worker_parts import DeviceReadings, GpuReadings

EVERY_S = 5.0
NVML = "libnvidia-ml.so.1"
_MIB = 1024 * 1024
_XID_EVENT = 0x8
_SM_CLOCK, _GPU_TEMPERATURE = 1, 0
_log = logging.getLogger(__name__)


class NvmlError(Exception):
    """NVML is not there, or does not know the device."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class NvmlDevice:
    """One GPU as the driver sees it."""

    def __init__(self, uuid: str, library: str = NVML) -> None:
        """`uuid` as the driver writes it: "GPU-...".

        Raises:
            NvmlError: the library or the device is not there.
        """
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(str(error)) from None
        self._device, self._events = ctypes.c_void_p(), ctypes.c_void_p()
        if self._call("nvmlInit_v2") != 0:
            raise NvmlError("NVML cannot be initialised")
        if self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device)) != 0:
            raise NvmlError(f"NVML does not know {uuid}")
        index = ctypes.c_uint()
        self._call("nvmlDeviceGetIndex", self._device, ctypes.byref(index))
        self.index = index.value
        self._xid = 0
        self._hears_xids = (
            self._call("nvmlEventSetCreate", ctypes.byref(self._events)) == 0
            and self._call(
                "nvmlDeviceRegisterEvents", self._device, ctypes.c_ulonglong(_XID_EVENT), self._events
            )
            == 0
        )

    def read(self) -> GpuReadings:
        """The device's numbers as of now."""
        busy, memory = _Utilization(), _Memory()
        has_busy = self._call("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(busy)) == 0
        has_memory = self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory)) == 0
        power_mw = self._number("nvmlDeviceGetPowerUsage")
        return GpuReadings(
            index=self.index,
            util=busy.gpu if has_busy else None,
            memory_util=busy.memory if has_busy else None,
            used_mib=memory.used // _MIB if has_memory else None,
            free_mib=memory.free // _MIB if has_memory else None,
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=self._number("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
            sm_clock_mhz=self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            xid=self.last_xid() if self._hears_xids else None,
        )

    def last_xid(self) -> int:
        """The Xid of the last error that the driver told of since this was made; 0: there was none."""
        event = _Event()
        while (
            self._hears_xids and self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0) == 0
        ):
            if event.type == _XID_EVENT:
                self._xid = event.data
        return self._xid

    def _number(self, name: str, *what: int) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._call(name, self._device, *what, ctypes.byref(value)) == 0 else None

    def _call(self, name: str, *args: object) -> int:
        """NVML's return code; another one than 0 where this driver's library lacks the function."""
        function: Callable[..., int] | None = getattr(self._nvml, name, None)
        return -1 if function is None else function(*args)


def process_readings(memory: CgroupMemory | None) -> DeviceReadings:
    """This process's memory and CPU time, the memory of its cgroup (None: it is in none), and the machine's
    load.
    """
    times, cores = os.times(), len(os.sched_getaffinity(0))
    return DeviceReadings(
        rss_bytes=_rss_bytes(),
        cpu_ms=round(1000 * (times.user + times.system)),
        cgroup_bytes=0 if memory is None else memory.used_bytes(),
        cgroup_limit_bytes=0 if memory is None else memory.limit_bytes(),
        load=round(os.getloadavg()[0] / cores, 2),
    )


def _rss_bytes() -> int:
    """See proc(5): pages, the second number."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watch_device(
    uuid: str, tell: Callable[[DeviceReadings], None], every_s: float = EVERY_S
) -> threading.Event:
    """Tell of the readings every so often, until the event that this returns is set. `uuid` is that of the
    GPU that this process computes on; empty: it has none.
    """
    gpu: NvmlDevice | None = None
    if uuid:
        try:
            gpu = NvmlDevice(uuid)
        except NvmlError as error:
            _log.warning("there are no readings of the GPU: %s", error)
    ends = threading.Event()

    def watch() -> None:
        while True:
            readings = process_readings(CgroupMemory.of_self())
            tell(readings if gpu is None else msgspec.structs.replace(readings, gpu=gpu.read()))
            if ends.wait(every_s):
                return

    threading.Thread(target=watch, name="worker-device", daemon=True).start()
    return ends
