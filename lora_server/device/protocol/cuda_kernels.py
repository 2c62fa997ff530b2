"""Kernels on a real GPU: compiled by NVRTC when they are first used, and launched with the shape that each needs.

CuPy compiles without nvcc, and caches what came out on disk, under a hash of source, options and compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernels_cuda import routing
from kernels_cuda.build import STANDARD, read_source
from kernels_cuda.cuda import on_device, on_torch_stream
from kernels_cuda.heuristics import STAGES, Variant, choose
from kernels_cuda.residency import SERVE_WARPS
from lora_server.device.protocol.source import FILES, ONE_WARP, SERVES

PUT_BLOCKS = 16  # few, so that the engine's GEMM keeps its multiprocessors
LINK = PUT = Variant(bulk_copy=False, warps=8)
ROUTE = Variant(bulk_copy=False, warps=routing.WARPS, stages=STAGES)
ONE_BLOCK = ("route", "link_wait", "link_send")
SERVE_OWN_BYTES = 8192  # of shared memory, at most, beside what the compute takes
Load = Callable[[str, tuple[str, ...]], Any]  # from a source and the compiler's options to a cupy.RawModule


def compiled(source: str, defines: tuple[str, ...]) -> Any:
    """Compile a source; see Load."""
    import cupy

    text = read_source(source, FILES)
    return cupy.RawModule(code=text, options=(STANDARD, *defines))


class DeviceKernels:
    """The kernels of one GPU. Thread-safe."""

    def __init__(
        self, device: torch.device, sources: Mapping[str, str], multiprocessors: int | None, load: Load
    ) -> None:
        """`sources`: of each kernel; `multiprocessors`: of a kernel that serves, by default all.

        The others are a client's, where both are one process's.
        """
        import cupy

        self._device, self._sources, self._load = device, sources, load
        about = cupy.cuda.Device(device.index).attributes
        self._multiprocessors = int(about["MultiProcessorCount"])
        self._serving = multiprocessors or self._multiprocessors
        optin = about["MaxSharedMemoryPerBlockOptin"]
        self._serve = choose(torch.cuda.get_device_capability(device), optin - SERVE_OWN_BYTES, SERVE_WARPS)
        self._functions: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}  # by source
        self._lock = threading.Lock()

    def compile(self, source: str) -> None:
        """Make a source's kernels ready."""
        for kernel, its in self._sources.items():
            if its == source:
                self.function(kernel)

    def function(self, kernel: str) -> Any:
        """Return a kernel as a function of CuPy's."""
        with self._lock, on_device(self._device):
            if kernel not in self._functions:
                source = self._sources[kernel]
                if source not in self._modules:
                    self._modules[source] = self._load(source, self.variant(source).defines)
                function = self._modules[source].get_function(kernel)
                if self.shared_bytes(source):
                    function.max_dynamic_shared_size_bytes = self.shared_bytes(source)
                self._functions[kernel] = function
            return self._functions[kernel]

    def variant(self, source: str) -> Variant:
        """Return the parameters with which a source is compiled."""
        return self._serve if source in SERVES else {"link.cu": LINK, "put.cu": PUT, "route.cu": ROUTE}[source]

    def shared_bytes(self, source: str) -> int:
        """Return the shared memory of a source's blocks."""
        if source in SERVES:
            return self._serve.shared_bytes + SERVE_OWN_BYTES
        return routing.shared_bytes(routing.WARPS) if source == "route.cu" else 256 * (source == "link.cu")

    def launch(self, kernel: str, values: tuple[int, ...]) -> None:
        """Launch a kernel on torch's current stream."""
        import cupy

        source = self._sources[kernel]
        warps = 1 if kernel in ONE_WARP else self.variant(source).warps + (source in SERVES)
        numbers = tuple(cupy.uint64(value) for value in values)
        with on_torch_stream(self._device):
            function, shared = self.function(kernel), self.shared_bytes(source)
            function((self._blocks(kernel),), (32 * warps,), numbers, shared_mem=shared)

    def _blocks(self, kernel: str) -> int:
        if self._sources[kernel] in SERVES:
            return self._serving
        if kernel.startswith("link_add"):  # which the engine waits for
            return self._multiprocessors
        return 1 if kernel in ONE_BLOCK else PUT_BLOCKS
