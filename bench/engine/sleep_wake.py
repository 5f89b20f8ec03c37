"""The memory that a sleeping model gives back, and the time to come back.

    python -m bench.engine.sleep_wake [--shapes 494m] [--forms none int8 int4] [--rounds 5] [--before DIR]
                               [--json FILE]

Every case is a worker process as a launcher starts it, spoken to over its socket: a model in one form is
loaded, answers once, sleeps and wakes `rounds` times. Memory is the process' own (anonymous) and its resident
memory, awake and asleep. Waking is from `Wake` to `Ready`, with the file in the page cache: reading, packing
and the first steps. It is held against the least that moving the bytes could take, the file's bytes at the
bandwidth with which this machine copies memory, which is measured before each round; and against the other
design, ending the process and starting a new one, measured in the same way from its start to `Ready`.

Memory that the kernel gives a process is zeroed first, and on a virtual machine perhaps fetched from the
host: `fresh_gb_per_s` is the speed at which memory that is new to the process is written, by one thread
and by one for each processor, as packing does it; `fresh_bound_s` is the time that the model's memory takes
at the latter, and the same allowance. With `--before` a worker of
another checkout, built, wakes in turn with ours, and the ratio of the two is told.
"""

import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
from raw_worker import REAL, Client, launch_line, submit

from bench.harness import REPOSITORY, command_line, write_result
from bench.peers.shapes import SHAPES, make_model
from penstock.protocol.address import UnixAddress
from penstock.protocol.worker import Asleep, Ready
from penstock.protocol.worker_parts import Sleep, Wake

WORK = REPOSITORY / "bench" / "out" / "models"
KV_BYTES = 64 << 20
MAX_LEN = 1024
PROMPT = tuple(range(20, 276))
FORMS = ("none", "int8", "int4")
"""`engine.quantization`: whole weights, and rounded while they are loaded."""
ALLOWANCE_S = 0.5
"""The time that waking may take beyond the bytes."""


class Process:
    """One worker."""

    def __init__(self, model: Path, quantization: str, root: Path = REPOSITORY, **engine: object) -> None:
        """`root`: the checkout that it runs; `engine`: settings other than those of this bench."""
        self._place = tempfile.TemporaryDirectory()
        address = UnixAddress(f"{self._place.name}/w.sock")
        self._child = subprocess.Popen(
            (sys.executable, "-m", "penstock.engine.worker"),
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(root)},
            cwd=root,
        )
        assert self._child.stdin is not None
        line = launch_line(
            address,
            model_path=str(model),
            runner=REAL,
            **{
                "dtype": "bfloat16",
                "quantization": quantization,
                "kv_memory_bytes": KV_BYTES,
                "host_kv_memory_bytes": 0,
                "max_model_len": MAX_LEN,
                **engine,
            },
        )
        self._child.stdin.write(line)
        self._child.stdin.flush()
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                self.client = Client(address)
                break
            time.sleep(0.005)

    def ready(self) -> Ready:
        """The next time that it says so."""
        found = self.client.until_kind(Ready)
        assert isinstance(found, Ready)
        return found

    def memory(self) -> dict[str, int]:
        """Resident and own bytes."""
        resident, shared = Path(f"/proc/{self._child.pid}/statm").read_text().split()[1:3]
        page = os.sysconf("SC_PAGE_SIZE")
        return {"resident": int(resident) * page, "own": (int(resident) - int(shared)) * page}

    def answer(self, name: str) -> tuple[int, ...]:
        """Greedy tokens."""
        self.client.send(submit(name, PROMPT, max_tokens=8))
        return tuple(token for output in self.client.outputs(name) for token in output.token_ids)

    def fall_asleep(self) -> float:
        """Seconds until it sleeps."""
        begun = time.perf_counter()
        self.client.send(Sleep())
        self.client.until_kind(Asleep)
        return time.perf_counter() - begun

    def wake(self) -> float:
        """Seconds until it is ready."""
        begun = time.perf_counter()
        self.client.send(Wake())
        self.ready()
        return time.perf_counter() - begun

    def end(self) -> None:
        """It is gone when this returns."""
        self.client.close()
        self._child.kill()
        self._child.wait()
        self._place.cleanup()


def copy_bytes_per_s() -> float:
    """Bytes that one copy of memory moves: the best of five, so that neighbours count little."""
    source = np.ones(256 << 20, np.uint8)
    target = np.empty_like(source)
    took: list[float] = []
    for _ in range(5):
        begun = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - begun)
    return source.nbytes / min(took)


def fresh_bytes_per_s(num_threads: int) -> float:
    """Bytes that so many threads together write to memory that the kernel has just given, in huge pages."""
    memory = mmap.mmap(-1, 256 << 20)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    threads = [Thread(target=part.fill, args=(1,)) for part in np.array_split(pages, num_threads)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pages.nbytes / (time.perf_counter() - begun)


def wakes_before(process: Process) -> float:
    """One wake of another checkout's worker."""
    process.fall_asleep()
    return process.wake()


def measure(model: Path, quantization: str, rounds: int, before_root: Path | None) -> dict[str, Any]:
    """One model in one form."""
    file_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    starts: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        process = Process(model, quantization)
        process.ready()
        starts.append(time.perf_counter() - begun)
        process.end()
    old = None if before_root is None else Process(model, quantization, before_root)
    if old is not None:
        old.ready()
    process = Process(model, quantization)
    info, before = process.ready().info, process.answer("before")
    wakes, falls, bandwidths, olds = (list[float]() for _ in range(4))
    num_cpus = len(os.sched_getaffinity(0))
    fresh: dict[int, list[float]] = {1: [], num_cpus: []}
    awake, asleep = process.memory(), dict[str, int]()
    for i in range(rounds):
        if old is not None:
            olds.append(wakes_before(old))
        bandwidths.append(copy_bytes_per_s())
        for num_threads, found_rates in fresh.items():
            found_rates.append(fresh_bytes_per_s(num_threads))
        falls.append(process.fall_asleep())
        asleep = process.memory()
        wakes.append(process.wake())
        assert process.answer(f"after {i}") == before, "the same model came back"
    again = process.memory()
    process.end()
    if old is not None:
        old.end()
    floor_s = file_bytes / statistics.median(bandwidths)
    wake_s = statistics.median(wakes)
    ratios = [one / other for one, other in zip(olds, wakes, strict=False)]
    found = {
        "model": model.name,
        "quantization": quantization,
        "file_bytes": file_bytes,
        "planned_weight_bytes": info.weight_bytes,
        "awake_bytes": awake,
        "asleep_bytes": asleep,
        "awake_again_bytes": again,
        "given_back_of_planned": round((awake["own"] - asleep["own"]) / info.weight_bytes, 3),
        "copy_gb_per_s": round(statistics.median(bandwidths) / 1e9, 2),
        "fresh_gb_per_s": {
            str(count): [round(each / 1e9, 2) for each in rates] for count, rates in fresh.items()
        },
        "fresh_bound_s": round(info.weight_bytes / statistics.median(fresh[num_cpus]) + ALLOWANCE_S, 3),
        "bytes_over_bandwidth_s": round(floor_s, 3),
        "wake_s": [round(each, 3) for each in wakes],
        "wake_median_s": round(wake_s, 3),
        "bound_s": round(floor_s + ALLOWANCE_S, 3),
        "within_bound": wake_s <= floor_s + ALLOWANCE_S,
        "fall_asleep_s": [round(each, 3) for each in falls],
        "new_process_s": [round(each, 3) for each in starts],
        "new_process_over_wake": round(statistics.median(starts) / wake_s, 2),
    }
    if ratios:
        found["before_wake_s"] = [round(each, 3) for each in olds]
        found["before_over_now"] = round(statistics.median(ratios), 2)
        found["before_over_now_spread"] = [round(min(ratios), 2), round(max(ratios), 2)]
    return found


def main() -> None:
    """Measure every form of every shape."""
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=["494m"])
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=FORMS)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, with kernels built")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for shape in args.shapes:
        model = make_model(SHAPES[shape], WORK / shape)
        for form in args.forms:
            found.append(measure(model, form, args.rounds, args.before and args.before.resolve()))
            print(msgspec.json.format(msgspec.json.encode(found[-1])).decode())
    write_result(args.json, {"cases": found})


if __name__ == "__main__":
    main()
