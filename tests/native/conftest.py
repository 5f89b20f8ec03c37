"""Tests of the native kernels run on every instruction set of this machine; without a C++ compiler they are
skipped, and with one a library that is not there fails them.

PENSTOCK_TEST_KERNELS names another build of the library, such as one with sanitizers (docs/design/003).
"""

import os
import platform
import shutil
from pathlib import Path

import pytest
import torch

from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.native.library import LIBRARY

CAN_BUILD = platform.machine() == "x86_64" and shutil.which("g++") is not None
ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def kernels(request):
    """The library on one instruction set; tests of threads ask for more."""
    library = Path(os.environ.get("PENSTOCK_TEST_KERNELS", LIBRARY))
    assert library.exists() or not CAN_BUILD, f"{library} was not built, though it could have been"
    try:
        loaded = NativeLibrary(library, request.param)
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    loaded.set_threads(1)
    return loaded


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(7)
