"""The worker's machine as its process sees it: readings of its device and its memory, and faults.

Readings are NVML's numbers of the GPU, and the kernel's of the process and its cgroup, every few seconds on a
thread of their own, since a driver may be slow to answer. NVML is the driver's own library, loaded by name:
without it there is no GPU to read. A reading that the device does not support is left out.

Faults are NVIDIA's Xids in the kernel's log, and kills for lack of memory in the worker's cgroup, watched by
another thread. The meaning of an Xid for the worker follows NVIDIA's catalog of Xids by class. A number that
is not in it is taken for the worst: a device with an unknown fault is not computed on.

A kill of the worker itself is its launcher's to see (fleet/launchers/process.py). Another process of the same
cgroup that is killed means that the worker may be next: in a cgroup of its own it ends in order, so that its
streams move before the kernel chooses; where other programs share the cgroup it is only reported.
"""

import ctypes
import enum
import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
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


class Remedy(enum.StrEnum):
    """The remedy for the worker on the device."""

    END = "end"
    """Its process ends, its streams move, and it is not started again: the device wants a reset or is
    gone."""
    RESTART = "restart"
    """Its process ends, its streams move, and it is started again."""
    NOTE = "note"
    """It continues; operators are notified."""


@dataclass(slots=True, frozen=True)
class Xid:
    """One line of the driver."""

    device: str
    """PCI domain, bus and device: "0000:3b:00"."""
    code: int
    remedy: Remedy
    text: str


_END = (
    79,  # Fallen off the bus.
    46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158,  # Reset the device.
    48, 74, *range(144, 151),  # Uncorrectable memory errors and links.
    54, 78, 151,  # Power, firmware, virtual machine.
)  # fmt: skip
_RESTART = (8, 11, 13, 25, 31, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, 94)
_NOTE = (
    45,  # Follows another one.
    37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161,
)  # fmt: skip
REMEDIES: dict[int, Remedy] = {
    **dict.fromkeys(_END, Remedy.END),
    **dict.fromkeys(_RESTART, Remedy.RESTART),
    **dict.fromkeys(_NOTE, Remedy.NOTE),
}
RECOVERY_CHANGED = 154
"""Its text names the action that the device wants now."""
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")


def parse_xid(line: str) -> Xid | None:
    """The Xid in a line of the kernel's log; None if it is about something else."""
    found = _LINE.search(line)
    if found is None:
        return None
    code, text = int(found[2]), found[3].strip(" ,")
    remedy = REMEDIES.get(code, Remedy.END)
    if code == RECOVERY_CHANGED:
        remedy = Remedy.NOTE if text.rstrip(".").endswith("(None)") else Remedy.END
    return Xid(found[1].lower().partition(".")[0], code, remedy, text[:200])


LOOK_S = 0.25
"""Between two looks: reaction and all are to be over in 2 s."""
RECORD_BYTES = 64 * 1024

OnFault = Callable[[str, str, Remedy], None]
"""Told (kind, words, remedy), on the watch's thread."""


class KernelLog:
    """New lines of the kernel's log: `/dev/kmsg`, or a file that it is written to."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: it may not be read."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_END)  # Earlier lines are not about this worker.
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError:
            self.close()
            raise

    def lines(self) -> list[str]:
        """Those that came since the last call."""
        self._reopen()
        found = list[str]()
        while True:
            try:
                data = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno == errno.EPIPE:  # The ring has overrun us: the next read continues behind.
                    continue
                return found
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [line.decode(errors="replace") for line in lines]
            if len(self._rest) > RECORD_BYTES:
                self._rest = b""
            if not data:
                return found

    def _reopen(self) -> None:
        """Begin again where the file was rotated away or cut; a device is neither."""
        try:
            held, named = os.fstat(self._descriptor), os.stat(self._path)
            if not stat.S_ISREG(held.st_mode):
                return
            if (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.close(self._descriptor)
                self._descriptor, self._rest = descriptor, b""
            elif named.st_size < os.lseek(self._descriptor, 0, os.SEEK_CUR):
                os.lseek(self._descriptor, 0, os.SEEK_SET)
                self._rest = b""
        except OSError:  # Between two names, or not ours to read any more: the next look tries again.
            return

    def close(self) -> None:
        """Read no more."""
        os.close(self._descriptor)


class FaultWatch:
    """`start` it once; it tells `on_fault` of everything."""

    def __init__(
        self, *, device: str, kernel_log: Path | None, memory: CgroupMemory | None, on_fault: OnFault
    ) -> None:
        """`device`: PCI address of the one that computes; empty: of any.

        `kernel_log`: None watches no devices.
        """
        self._device, self._memory, self._on_fault = device.lower(), memory, on_fault
        self._log: KernelLog | None = None
        if kernel_log is not None:
            try:
                self._log = KernelLog(kernel_log)
            except OSError as error:
                _log.info("no watch for device faults: %s: %s", kernel_log, error.strerror)
        self._kills = memory.num_kills() if memory is not None else 0
        self._closed = threading.Event()

    def start(self) -> None:
        """Watch, if there is anything to watch."""
        if self._log is not None or self._memory is not None:
            threading.Thread(target=self._run, name="worker-faults", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def look(self) -> None:
        """See what has happened since the last look."""
        for line in self._log.lines() if self._log is not None else ():
            xid = parse_xid(line)
            if xid is not None and self._device in ("", xid.device):
                kind = "xid_noted" if xid.remedy is Remedy.NOTE else "xid"
                self._on_fault(kind, f"Xid {xid.code} of the device {xid.device}: {xid.text}", xid.remedy)
        if self._memory is not None and (kills := self._memory.num_kills()) > self._kills:
            self._kills = kills
            remedy = Remedy.RESTART if self._memory.is_own(os.getpid()) else Remedy.NOTE
            words = f"the kernel killed a process for lack of memory in {self._memory.directory}"
            self._on_fault("oom_kill", words, remedy)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look()
        if self._log is not None:
            self._log.close()
