"""NVML read by way of a stub of its library, and the readings of a machine without one."""

import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from penstock.config.machine import CgroupMemory
from penstock.engine.machine_watch import NvmlDevice, NvmlError, process_readings, watch_device
from penstock.protocol.worker_parts import DeviceReadings, GpuReadings

STUB = r"""
#include <string.h>
typedef unsigned int u32; typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory; typedef struct { u32 gpu, memory; } busy;
typedef struct { void *device; u64 type, data; u32 gi, ci; } event;
static int device; static u64 pending[8]; static int num_pending;
void stub_xid(u64 xid) { pending[num_pending++] = xid; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  *handle = &device; return strcmp(uuid, "GPU-1") == 0 ? 0 : 6; }
int nvmlDeviceGetIndex(void *handle, u32 *index) { *index = 3; return handle != &device; }
int nvmlDeviceGetUtilizationRates(void *handle, busy *found) {
  found->gpu = 87; found->memory = 41; return handle != &device; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
  found->total = 80ull << 30; found->used = 70ull << 30; found->free = 10ull << 30;
  return handle != &device; }
int nvmlDeviceGetPowerUsage(void *handle, u32 *mw) { *mw = 312500; return handle != &device; }
int nvmlDeviceGetTemperature(void *handle, u32 sensor, u32 *c) { *c = 71; return sensor != 0; }
int nvmlDeviceGetClockInfo(void *handle, u32 type, u32 *mhz) { return 3; /* not supported */ }
int nvmlEventSetCreate(void **set) { *set = &num_pending; return 0; }
int nvmlDeviceRegisterEvents(void *handle, u64 types, void *set) {
  return !(types == 8 && set == &num_pending); }
int nvmlEventSetWait_v2(void *set, event *found, u32 ms) {
  if (!num_pending) return 10; /* timeout */
  found->device = &device; found->type = 8; found->data = pending[0];
  memmove(pending, pending + 1, sizeof pending - sizeof *pending); num_pending--; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("nvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    (place / "stub.c").write_text(STUB)
    path = place / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", path, place / "stub.c"], check=True)
    return str(path)


def test_what_nvml_says_of_a_gpu(library: str) -> None:
    gpu = NvmlDevice("GPU-1", library)
    assert gpu.read() == GpuReadings(
        index=3, util=87, memory_util=41, used_mib=71_680, free_mib=10_240, power_w=312.5, temperature_c=71,
        sm_clock_mhz=None, xid=0,
    )  # fmt: skip
    stub = ctypes.CDLL(library)
    for xid in (31, 79):
        stub.stub_xid(ctypes.c_ulonglong(xid))
    assert gpu.last_xid() == 79
    assert gpu.read().xid == 79, "the last error stays"


def test_a_gpu_or_a_library_that_is_not_there(library: str) -> None:
    with pytest.raises(NvmlError, match="does not know GPU-2"):
        NvmlDevice("GPU-2", library)
    with pytest.raises(NvmlError, match="cannot open"):
        NvmlDevice("GPU-1", "libno-such-nvml.so")


def test_what_a_process_takes_of_its_machine(tmp_path: Path) -> None:
    """Its own cgroup's, wherever that is; the limit may be that of a cgroup around it."""
    own = tmp_path / "pod" / "worker"
    own.mkdir(parents=True)
    (tmp_path / "self").write_text("1:name=other:/x\n0::/pod/worker\n")
    for name, text in (("memory.events", ""), ("memory.current", "123456\n"), ("memory.max", "max\n")):
        (own / name).write_text(text)
    memory = CgroupMemory.of_self(tmp_path, tmp_path / "self")
    found = process_readings(memory)
    assert (found.cgroup_bytes, found.cgroup_limit_bytes, found.gpu) == (123_456, 0, None)
    (own.parent / "memory.max").write_text("4096000\n")
    assert process_readings(memory).cgroup_limit_bytes == 4_096_000
    (own / "memory.max").write_text("1000000\n")
    assert process_readings(memory).cgroup_limit_bytes == 1_000_000
    found = process_readings(None)
    assert (found.cgroup_bytes, found.cgroup_limit_bytes) == (0, 0)
    assert found.rss_bytes > 10_000_000
    times = os.times()
    assert 0 < found.cpu_ms <= 1000 * (times.user + times.system) + 1
    assert found.load >= 0


def test_readings_are_told_until_the_end() -> None:
    reported, enough = list[DeviceReadings](), threading.Event()

    def tell(readings: DeviceReadings) -> None:
        reported.append(readings)
        if len(reported) >= 3:
            enough.set()

    ends = watch_device("GPU-none", tell, every_s=0.001)
    assert enough.wait(20)
    ends.set()
    assert all(each.rss_bytes and each.gpu is None for each in reported)
