"""A GPU's AdamW without a GPU: compiled for the CPU, and called as it is launched, it has the bits of torch's."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

from harness.core import native_build
from harness.core.method import create
from methods.offload import adamw_cuda
from methods.offload.adamw import published_settings
from methods.offload.state import State, joined_master, keep_master_
from tests.methods.offload.test_adamw_kernel import NUM_STEPS, NUMEL, by_torch, empty_state, pieces, random
from tests.support.training import tiny

# What a GPU's compiler knows by itself, and a launch: every thread of the grid, one after the other.
SHIM = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __CUDACC_RTC__
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
static uint32_t bits_of(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
static float of_bits(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
#define __float_as_uint bits_of
#define __uint_as_float of_bits
static struct { unsigned x, y; } blockIdx, threadIdx, blockDim, gridDim;
#include "adamw_cuda.cu"
template <typename Type> static Type at(void** args, int place) { return *static_cast<Type*>(args[place]); }
extern "C" void launch(unsigned grid_x, unsigned grid_y, unsigned block_x, void** args) {
    gridDim = {grid_x, grid_y}, blockDim = {block_x, 1};
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < block_x; ++threadIdx.x)
                adamw(at<uint16_t*>(args, 0), at<uint16_t*>(args, 1), at<uint16_t*>(args, 2), at<float*>(args, 3),
                      at<float*>(args, 4), at<uint16_t*>(args, 5), at<uint16_t*>(args, 6), at<float*>(args, 7),
                      at<float*>(args, 8), at<Piece*>(args, 9), at<float*>(args, 10), at<int>(args, 11),
                      at<double>(args, 12), at<double>(args, 13), at<double>(args, 14), at<double>(args, 15),
                      at<double>(args, 16), at<double>(args, 17), at<double>(args, 18), at<double>(args, 19));
}
"""

TABLE = [number for start, stop, group in pieces() for number in (start, stop, 1 - group)]


def settings(learning_rate: float) -> tuple[float, ...]:
    return published_settings(learning_rate)[0]


class Launched:
    """A compiled kernel, launched as torch does it: tensors as pointers, whole numbers as int, others as double."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def __call__(self, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any]) -> None:
        kinds: dict[type, Any] = {int: ctypes.c_int, float: ctypes.c_double}
        values = [
            ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, Tensor) else kinds[type(arg)](arg)
            for arg in args
        ]
        assert len(values) == 20 and grid[2] == block[1] == block[2] == 1
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.library.launch(grid[0], grid[1], block[0], pointers)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Device 0 of a CUDA whose compiler is the host's."""
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")

    def compile_kernel(
        text: str, name: str, *, cuda_include_dirs: list[str], nvcc_options: list[str]
    ) -> Launched:
        assert (
            text == adamw_cuda.KERNEL_SOURCE.read_text()
            and name == "adamw"
            and "--fmad=false" in nvcc_options
        )
        cpp_extension.include_paths("cuda")  # as torch does: raises OSError where there is no toolkit
        source, library = tmp_path / "shim.cpp", tmp_path / "shim.so"
        source.write_text(SHIM)
        folders = [f"-I{folder}" for folder in cuda_include_dirs]
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", *folders]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        return Launched(library)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_kernel)
    adamw_cuda._compiled_for.cache_clear()
    yield
    adamw_cuda._compiled_for.cache_clear()


def test_the_kernel_needs_no_toolkit(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert adamw_cuda.compiled_kernel() is not None and cpp_extension.CUDA_HOME is None


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in place", "ahead"])
@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("most_blocks", [1, 2048])
def test_a_layer_in_halves_has_the_very_bits_of_torchs_fused_adamw(
    gpu: None, is_ahead: bool, factor: float | None, most_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_cuda, "MOST_BLOCKS", most_blocks)
    state = empty_state(NUMEL)
    other = empty_state(NUMEL) if is_ahead else state
    keep_master_(state, random(NUMEL, 0))
    scale = None if factor is None else torch.tensor(factor)
    for number in range(1, NUM_STEPS + 1):
        grads = random(NUMEL, number).bfloat16()
        adamw_cuda.update_on_gpu(
            grads, list(state), list(other), scale, 1.0, TABLE, settings(1e-3 * number), number, 1, 0
        )
        state, other = other, state
    slabs = (state.weights, joined_master(state), state.exp_avg, state.exp_avg_sq.abs())
    updated = [torch.cat([slab[start:stop] for start, stop, _ in pieces()]) for slab in slabs]
    assert all(map(torch.equal, updated, by_torch(factor)))


def test_slabs_that_start_between_vectors_get_the_same_bits(gpu: None) -> None:
    """A thread takes four elements at once only where all slabs allow it."""
    inside, aligned = (State(*(slab[start:] for slab in empty_state(NUMEL + start))) for start in (1, 0))
    for state in (inside, aligned):
        keep_master_(state, random(NUMEL, 0))
        grads = random(NUMEL, 1).bfloat16()
        adamw_cuda.update_on_gpu(grads, list(state), list(state), None, 1.0, TABLE, settings(1e-3), 1, 1, 0)
    assert inside.exp_avg.any() and all(map(torch.equal, inside, aligned))


def test_a_scale_that_is_known_takes_part_in_the_factor(gpu: None) -> None:
    state = empty_state(NUMEL)
    known, computed = empty_state(NUMEL), empty_state(NUMEL)
    keep_master_(state, random(NUMEL, 0))
    grads = random(NUMEL, 1).bfloat16()
    adamw_cuda.update_on_gpu(grads, list(state), list(known), None, 0.25, TABLE, settings(1e-3), 1, 1, 0)
    adamw_cuda.update_on_gpu(
        grads, list(state), list(computed), torch.tensor(0.5), 0.5, TABLE, settings(1e-3), 1, 1, 0
    )
    assert known.exp_avg.any() and all(map(torch.equal, known, computed))


def test_the_operation_is_a_gpus_too() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("harness::adamw", "CUDA")


def test_where_torch_cannot_compile_it_torchs_kernels_update_and_the_record_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This machine's torch knows no GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    adamw_cuda._compiled_for.cache_clear()
    monkeypatch.setattr(adamw_cuda, "_failed_devices", set())
    stronghold, workload = create("stronghold", {}), tiny(dtype="bf16")
    assert stronghold.describe(workload, "cuda")["optimizer"].endswith("of masters in halves: in one pass")
    with pytest.warns(UserWarning, match="by torch's kernels"):
        assert adamw_cuda._compiled_for(0) is None
    assert stronghold.describe(workload, "cuda")["optimizer"].endswith("since NVRTC compiled no kernel")
    adamw_cuda._compiled_for.cache_clear()
