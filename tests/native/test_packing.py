"""The memory of packed weights: in huge pages, filled by one call, without a second copy of a whole model."""

import mmap
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.engine.native.library import Type
from penstock.engine.native.packing import HUGE_PAGE_BYTES, WAITING_BYTES_MAX, MappedFiles, Packing
from penstock.engine.native.weights import exact, int4, pack, pack_into


@pytest.fixture
def counted(kernels, monkeypatch):
    """The kernels, which note how many copies each call made."""
    calls = []
    whole = kernels.pack
    monkeypatch.setattr(kernels, "pack", lambda jobs: (calls.append(len(jobs)), whole(jobs)))
    return kernels, calls


def test_a_models_weights_lie_behind_each_other_in_huge_pages(kernels, rng):
    packing = Packing(kernels)
    weights = [torch.randn(n, 96, generator=rng).bfloat16() for n in (40, 4000, 7)]
    packed = [pack_into(packing, exact(weight)) for weight in weights]
    packing.finish()
    starts = [each.tensors[0].data_ptr() for each in packed]
    assert starts[0] % HUGE_PAGE_BYTES == 0
    for start, following, each in zip(starts, starts[1:], packed, strict=False):
        assert start + each.tensors[0].nbytes <= following < start + each.tensors[0].nbytes + 64
        assert following % 64 == 0
    for each, weight in zip(packed, weights, strict=True):
        assert torch.equal(each.tensors[0], pack(kernels, exact(weight)).tensors[0])


def test_a_weight_that_does_not_fit_begins_a_piece_of_memory_of_its_own(kernels):
    packing = Packing(kernels, chunk_bytes=HUGE_PAGE_BYTES)
    small, large = packing.memory(1000, torch.float32), packing.memory(HUGE_PAGE_BYTES, torch.int8)
    assert small.shape == (1000,)
    assert large.data_ptr() % HUGE_PAGE_BYTES == 0
    assert packing.memory(3, torch.bfloat16).numel() == 3


def test_a_weight_with_a_piece_of_its_own_leaves_the_rest_of_the_last_one_to_others(kernels):
    packing = Packing(kernels, chunk_bytes=HUGE_PAGE_BYTES)
    first = packing.memory(64, torch.int8)
    large = packing.memory(HUGE_PAGE_BYTES + 1, torch.int8)
    assert large.data_ptr() % HUGE_PAGE_BYTES == 0
    assert packing.memory(64, torch.int8).data_ptr() == first.data_ptr() + 64


def test_copies_wait_for_one_call_which_is_reported_first(counted, rng):
    kernels, calls = counted
    reported = []
    packing = Packing(kernels, on_copies=lambda: reported.append(len(calls)))
    for n in (8, 16, 24):
        pack_into(packing, int4(kernels, torch.randn(n, 64, generator=rng).bfloat16()))
    assert (calls, reported) == ([], [])
    packing.finish()
    assert (calls, reported) == ([3], [0])


def test_values_that_are_not_of_a_file_wait_only_up_to_a_bound(counted, tmp_path):
    kernels, calls = counted
    quarter = torch.zeros(WAITING_BYTES_MAX // 4 // 2 // 1024, 1024).bfloat16()
    packing = Packing(kernels)
    for _ in range(5):
        pack_into(packing, exact(quarter))
    assert calls == [5]
    save_file({"w": quarter}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        for _ in range(5):
            pack_into(packing, exact(file.get_tensor("w")))
    assert calls == [5]
    packing.finish()
    assert calls == [5, 5]


def test_a_files_values_wait_up_to_a_bound_so_that_a_large_model_is_read_as_it_is_taken(
    counted, tmp_path, monkeypatch
):
    kernels, calls = counted
    weight = torch.zeros(32, 64).bfloat16()
    monkeypatch.setattr("penstock.engine.native.packing.MAPPED_BYTES_MAX", 2 * weight.nbytes)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    packing = Packing(kernels)
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        for _ in range(7):
            pack_into(packing, exact(file.get_tensor("w")))
    assert calls == [3, 3]
    packing.finish()
    assert calls == [3, 3, 1]


def test_files_whose_names_are_no_text_are_known(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff\r \x85")
    with open(path, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=torch.uint8)
        assert MappedFiles().hold(mapped)


def test_files_that_are_mapped_later_are_known(tmp_path):
    mapped, own = MappedFiles(), torch.ones(1000)
    assert not mapped.hold(own)
    save_file({"w": own}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert mapped.hold(file.get_tensor("w"))
    assert not mapped.hold(own)


def test_bits_do_not_depend_on_threads(kernels, rng):
    weight = torch.randn(3000, 512, generator=rng).bfloat16()
    alone = pack(kernels, exact(weight)).tensors[0]
    kernels.set_threads(3)
    assert torch.equal(pack(kernels, exact(weight)).tensors[0], alone)
    assert exact(weight).kind is Type.BF16
