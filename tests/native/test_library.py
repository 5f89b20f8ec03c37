"""The library itself: finding it, threads, forks; and what happens where there is none."""

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from native_ops import linear

from penstock.engine.native import KernelsUnavailable, NativeLibrary, build
from penstock.engine.native.weights import exact, pack


def test_says_why_there_are_no_kernels(tmp_path):
    with pytest.raises(KernelsUnavailable, match="was not built"):
        NativeLibrary(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(KernelsUnavailable, match="cannot be used"):
        NativeLibrary(tmp_path / "text.so")


def test_another_library_is_refused(tmp_path):
    source = tmp_path / "other.cpp"
    for body, message in {
        'extern "C" int ps_abi_version() { return 1; }': "version 1",
        "int nothing;": "cannot be used",
    }.items():
        source.write_text(body)
        made = tmp_path / f"{len(body)}.so"
        try:
            subprocess.run([build.compiler(), "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
        except build.CannotBuild as why:
            pytest.skip(str(why))
        with pytest.raises(KernelsUnavailable, match=message):
            NativeLibrary(made)


def test_an_unknown_isa_is_refused(kernels):
    with pytest.raises(KernelsUnavailable, match="does not have sse9"):
        NativeLibrary(isa="sse9")
    NativeLibrary(isa=kernels.isa)  # Leaves the others' choice as it was.


def test_without_a_compiler_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler: looked for"):
        build.build(tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho unrecognized option >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.CannotBuild, match="unrecognized option"):
        build.build(tmp_path / "kernels.so")


def product(kernels, threads):
    kernels.set_threads(threads)
    rng = torch.Generator().manual_seed(1)
    weight = pack(kernels, exact(torch.randn(2000, 256, generator=rng).bfloat16()))
    return linear(kernels, weight, torch.randn(5, 256, generator=rng).bfloat16())


def test_bad_thread_counts_are_refused(kernels):
    with pytest.raises(ValueError, match="num_threads"):
        kernels.set_threads(0)


def test_calls_from_several_threads_wait_their_turn(kernels):
    want, wrong = product(kernels, 2), []

    def work():
        wrong.extend(1 for _ in range(20) if not torch.equal(product(kernels, 2), want))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def in_child(queue, isa):
    queue.put(product(NativeLibrary(isa=isa), 3).float().sum().item())


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads(kernels):
    want = product(kernels, 3).float().sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue, kernels.isa))
    child.start()
    assert queue.get(timeout=60) == want
    child.join()


IDLE = """
import resource, threading, torch
from penstock.engine.native import NativeLibrary
from native_ops import linear
from penstock.engine.native.weights import exact, pack
kernels = NativeLibrary()
kernels.set_threads(3)
weight = pack(kernels, exact(torch.ones(4096, 512).bfloat16()))
linear(kernels, weight, torch.ones(4, 512).bfloat16())
before = resource.getrusage(resource.RUSAGE_SELF)
threading.Event().wait(1.0)
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def test_idle_threads_use_no_processor_time():
    """With the best kernels that this machine has: the threads are the same for all."""
    doubles = str(Path(__file__).parents[1] / "doubles")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": doubles}
    done = subprocess.run(
        [sys.executable, "-c", IDLE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path.cwd(),
    )
    assert float(done.stdout) < 0.05
