"""The limits of the device: a large copy and a large matrix product.

Everything else is compared with these.
"""

import torch

from bench.gpu.common import Bench, Report


@torch.inference_mode()
def run(bench: Bench, report: Report) -> None:
    report.put("torch", torch.__version__)
    if not bench.cpu:
        facts = torch.cuda.get_device_properties(0)
        report.put("device", facts.name)
        report.put("multiprocessors", facts.multi_processor_count)
        report.put("memory_bytes", facts.total_memory)
    report.put("copy_bytes_per_s", copy_rate(bench))
    report.put("gemm_flops", gemm_rate(bench))
    found = report.found
    report.put(
        "summary",
        f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s, GEMM {found['gemm_flops'] / 1e12:.0f} TFLOP/s",
    )


def copy_rate(bench: Bench) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    size = 1 << 16 if bench.tiny else 1 << 32
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    return 2 * size / bench.seconds(lambda: void(target.copy_(source)), calls=3)


def gemm_rate(bench: Bench) -> float:
    """Operations per second of a square product on random numbers."""
    n = 64 if bench.tiny else 8192
    a, b = (torch.randn(n, n, dtype=bench.dtype, device=bench.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / bench.seconds(lambda: void(torch.mm(a, b, out=out)), calls=5)


def void(_: object) -> None:
    """For operations that return what they wrote."""
