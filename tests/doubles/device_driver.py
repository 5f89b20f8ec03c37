"""The device's runner on the CPU: the same code, with the kernels' torch twins, and graphs that are plain
calls.
"""

from pathlib import Path
from queue import SimpleQueue

from engine_driver import Driver

from penstock.clock import Clock, SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.adapters.manager import AdapterRead
from penstock.engine.core import build_core
from penstock.engine.gpu.load import Target, load_on_device
from penstock.engine.gpu.ops import Ops
from penstock.engine.gpu.platform import CpuPlatform, Platform
from penstock.engine.gpu.runner import DeviceRunner
from penstock.engine.gpu.torch_ops import TorchOps

TINY: dict[str, object] = {
    "dtype": "float32",
    "kernels": "torch",
    "kv_memory_bytes": 4 * 1024 * 1024,
    "max_running": 8,
    "step_tokens": 64,
    "max_model_len": 128,
}


def device_runner(
    path: Path,
    *,
    platform: Platform | None = None,
    clock: Clock | None = None,
    ops: Ops | None = None,
    **config: object,
) -> DeviceRunner:
    settings = EngineSettings(**(TINY | config))
    target = Target(settings, platform or CpuPlatform(), ops or TorchOps(), clock or SystemClock())
    return load_on_device(path, target, lambda _stage, _done, _total: None)


class DeviceDriver(Driver):
    """One engine around a device's runner."""

    runner: DeviceRunner

    def __init__(self, path: Path, **config: object) -> None:
        self.runner = device_runner(path, **config)
        settings = EngineSettings(**(TINY | config))
        self.core = build_core(self.runner, settings, b"k" * 32, SystemClock())
        self._asked, self._mail = 0, SimpleQueue[AdapterRead]()
