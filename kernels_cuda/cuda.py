"""The CUDA kernels of one GPU: each compiled by NVRTC on first use (CuPy caches the result), launched on a stream.

`kernels(device)` is all that a caller needs; `launch` is one call, safe to capture in a CUDA graph: its grid is
fixed, it reads every count from device memory, allocates nothing, and runs on the stream that is current
in torch. Launches that share a workspace must follow each other on one stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from kernels_cuda.build import STANDARD, read_kernel
from kernels_cuda.heuristics import Variant, choose
from kernels_cuda.launch import DTYPE_NAMES, DeviceStep, Workspace, arguments

NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


class _TorchStream:
    """torch's current stream, in the protocol by which CuPy accepts streams of other libraries."""

    def __init__(self, device: torch.device) -> None:
        self._pointer = int(torch.cuda.current_stream(device).cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make the device's context current in this thread. CuPy sets it even where torch believes that it already is.

    A thread that had no context keeps this one: going back as CuPy's own Device does, by cudaSetDevice(0), would make
    a context on GPU 0.
    """
    import cupy

    try:
        before = cupy.cuda.driver.ctxGetCurrent()
    except cupy.cuda.driver.CUDADriverError as error:
        if error.status != NOT_INITIALIZED:
            raise
        before = 0  # nothing of this process has called CUDA before
    cupy.cuda.runtime.setDevice(device.index)
    try:
        yield
    finally:
        if before:
            cupy.cuda.driver.ctxSetCurrent(before)


@contextmanager
def on_torch_stream(device: torch.device) -> Iterator[None]:
    """Send what CuPy launches inside to torch's current stream of the device."""
    import cupy

    with on_device(device), cupy.cuda.Stream.from_external(_TorchStream(device)):
        yield


class CudaKernels:
    """One GPU's kernels in one variant."""

    def __init__(self, device: torch.device, variant: Variant | None = None) -> None:
        import cupy

        about = cupy.cuda.Device(device.index).attributes
        self.device = device
        self.variant = variant or choose(
            torch.cuda.get_device_capability(device), about["MaxSharedMemoryPerBlockOptin"]
        )
        self.grid = int(about["MultiProcessorCount"])
        self._functions: dict[tuple[str, torch.dtype], Any] = {}

    def compile(self, dtype: torch.dtype, kernel: str = "lora_step") -> float:
        """Compile a kernel ahead of its first launch, which would compile it: too late if that is timed or captured.

        Returns the seconds that it took: few if CuPy's cache on disk had it. Raises ValueError for another dtype
        than bfloat16 and float16.
        """
        if (kernel, dtype) in self._functions:
            return 0.0
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"got {dtype}, expected torch.bfloat16 or torch.float16")
        import cupy

        begin, name = time.monotonic(), f"{kernel}_{DTYPE_NAMES[dtype]}"
        with on_device(self.device):
            options = (STANDARD, *self.variant.defines)
            module = cupy.RawModule(code=read_kernel(name), options=options, enable_cooperative_groups=True)
            function = module.get_function(name)
            function.max_dynamic_shared_size_bytes = self.variant.shared_bytes
        self._functions[kernel, dtype] = function
        return time.monotonic() - begin

    def launch(self, step: DeviceStep, out_UO: torch.Tensor, workspace: Workspace, kernel: str = "lora_step") -> None:
        """Launch a step. `ops` defines what it computes, `DeviceStep` where its arrays lie.

        kernel: "lora_step", or "shrink" (rows to workspace.v) and "expand" (workspace.v to out_UO) apart.
        out_UO: [U, O], the rows' dtype, contiguous; aliases none of the inputs. Raises ValueError for what
        does not fit; errors of the GPU surface at the next synchronisation, as everywhere in torch.
        """
        values = arguments(step, out_UO, workspace, self.variant.stages)
        self.compile(step.rows_TK.dtype, kernel)
        function = self._functions[kernel, step.rows_TK.dtype]
        with on_torch_stream(self.device):
            function((self.grid,), (self.variant.warps * 32,), tuple(values), shared_mem=self.variant.shared_bytes)


def kernels(device: torch.device) -> CudaKernels:
    """Return the kernels of a device, each compiled once per process. Raises ValueError for a GPU before sm_80."""
    return _of(torch.device(device.type, device.index or 0))


_of = cache(CudaKernels)
