"""Which variant a GPU gets, and which text the compiler. What it makes of every kernel: make gpu-build."""

from __future__ import annotations

import sys
import types
from unittest.mock import MagicMock

import pytest
import torch

from bench import gpu_build
from kernels_cuda import build
from kernels_cuda.cuda import CudaKernels
from kernels_cuda.heuristics import Variant, choose
from lora_server.transport.gpu import source

HOSTS = {  # compute capability, and shared memory per block
    "H100, H200": ((9, 0), 232448),
    "A100": ((8, 0), 166912),
    "A10, L40": ((8, 6), 101376),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_built_is_the_variant_that_the_gpu_gets(name):
    chosen, gpu = choose(*HOSTS[name]), gpu_build.GPUS[name]
    assert list(chosen.defines) == gpu.defines and gpu.arch.startswith("sm_90" if chosen.bulk_copy else "sm_80")
    assert chosen.shared_bytes <= HOSTS[name][1]


def test_every_source_is_built_and_held_to_its_bounds():
    sources = {path.name for path in build.SOURCE.glob("*.cu")} | source.FILES.keys() | gpu_build.OTHERS.keys()
    built = {job.name for job in gpu_build.JOBS}
    assert {name for name in sources if name.endswith(".cu")} == built
    job = gpu_build.Job("lora_step.cu", gpu_build.HOPPER)
    good = gpu_build.Usage("lora_step_bfloat16", 0, 0, 0, 255)
    assert not job.complaints(good, 1)
    for bad, nbytes in (
        (good._replace(stack=8), 1), (good._replace(spill_stores=4), 1), (good._replace(spill_loads=4), 1),
        (good._replace(registers=257), 1), (good, 0), (good, 200_000),
    ):  # fmt: skip
        (complaint,) = job.complaints(bad, nbytes)
        assert "lora_step_bfloat16" in complaint
    protocol = gpu_build.Usage("serve_bfloat16", 8, 0, 0, 162)
    assert gpu_build.Job("serve.cu", gpu_build.HOPPER).complaints(protocol, 1)
    assert not gpu_build.Job("serve.cu", gpu_build.HOPPER, nvshmem=True).complaints(protocol, 1)


def test_gpus_that_cannot_run_them_are_refused():
    with pytest.raises(ValueError, match=r"\(7, 5\), expected at least \(8, 0\)"):
        choose((7, 5), 65536)
    with pytest.raises(ValueError, match="16384 bytes of shared memory"):
        choose((8, 0), 16384)


def test_the_source_is_one_text_with_each_file_once():
    text = build.read_source()
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("struct Args {") == text.count("struct Ring {") == 1
    assert "instead" in build.read_source(instead={"ptx.cuh": "// instead"})


def test_a_kernel_alone_is_the_text_without_the_others():
    kernels = [f"{kernel}_{dtype}" for kernel in build.KERNELS for dtype in build.DTYPES]
    for name in kernels:
        text = build.read_kernel(name)
        assert [kernel for kernel in kernels if f"KERNEL({kernel}," in text] == [name]
        assert len(text.splitlines()) == len(build.read_source().splitlines()) - len(kernels) + 1


class FakeCuPy(types.ModuleType):
    """As much of CuPy as compiling takes; `compiled` holds the texts."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.compiled: list[str] = []
        device = MagicMock()
        device.return_value.attributes = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}
        self.cuda = types.SimpleNamespace(Device=device, driver=MagicMock(), runtime=MagicMock())

    def RawModule(self, *, code: str, options: tuple[str, ...], enable_cooperative_groups: bool) -> MagicMock:  # noqa: N802
        assert enable_cooperative_groups and build.STANDARD in options
        self.compiled.append(code)
        return MagicMock()


def test_a_process_compiles_what_it_launches_and_nothing_else(monkeypatch):
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    kernels = CudaKernels(torch.device("cuda", 0), Variant(bulk_copy=True, warps=8))
    assert not fake.compiled
    assert kernels.compile(torch.bfloat16) > 0
    assert kernels.compile(torch.bfloat16) == 0
    assert fake.compiled == [build.read_kernel("lora_step_bfloat16")]
    kernels.compile(torch.float16, "shrink")
    assert fake.compiled[1:] == [build.read_kernel("shrink_float16")]
    with pytest.raises(ValueError, match=r"got torch.float32, expected torch.bfloat16 or torch.float16"):
        kernels.compile(torch.float32)
