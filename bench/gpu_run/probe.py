"""Stage `probe`: what this GPU, its driver and its tools can do; then every kernel is compiled into the cache.

Its registers are read off the loaded modules then.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu_run import latencies, registers, stage, variants
from bench.gpu_run.record import Record
from bench.gpu_run.state import ROOT
from bench.kernels.__main__ import hardware
from lora_server.demo import children

TOOLS = {
    "nvcc": ("nvcc", "--version"),
    "ncu": ("ncu", "--version"),
    "compute-sanitizer": ("compute-sanitizer", "--version"),
    "nvidia-smi": ("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit,compute_mode",
                   "--format=csv,noheader"),
    "MPS": ("nvidia-cuda-mps-control", "-v"),
}  # fmt: skip
# the driver's numbers for what a transport may rely on
ATTRIBUTES = {
    "cooperative_launch": "CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH",
    "vmm": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "posix_fd_handles": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "fabric_handles": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
    "gpu_direct_rdma": "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
    "dma_buf": "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
    "host_pointer_is_device_pointer": "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "stream_mem_ops_64": "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS",
    "preemption": "CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED",
    "shared_bytes_per_block": "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "l2_bytes": "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE",
}
COMPILE_SECONDS = 100.0
IPC_BYTES = 4 << 20
COMPILED = {  # what later stages and the tests launch; what takes longest first
    "serve": "CudaGpu(device).compile('serve.cu')",
    "serve, rows in 8 bits": "CudaGpu(device).compile('serve_e4m3.cu')",
    **{f"{kernel}, {dtype}": f"kernels(device).compile(torch.{dtype}, '{kernel}')"
       for kernel in ("lora_step", "expand", "shrink") for dtype in ("bfloat16", "float16")},
    **{variants.name(variant): f"CudaKernels(device, {variant}).compile(torch.bfloat16)"
       for variant in variants.VARIANTS},
    **{f"test {number}": f"CudaKernels(device, {text}).compile(torch.bfloat16)" for number, text in enumerate(
        ("Variant(True, 1)", "Variant(True, 3, 3)", "Variant(False, 2)", "Variant(False, 4, 3)"))},
    "link": "CudaGpu(device).compile('link.cu')",
    "put": "try_out(torch.cuda.Stream(device), device)",
    "route": "router(device)",
}  # fmt: skip
NEEDED = ("lora_step, bfloat16", "lora_step, float16", "route", "put", "serve", "link")  # by the server itself
NEEDED_FIRST = ("serve", "serve, rows in 8 bits", "lora_step, bfloat16", "link", "put", "route")  # by stage `first`
PRELUDE = """
import sys, cupy, torch
from kernels_cuda.cuda import CudaKernels, kernels
from kernels_cuda.heuristics import Variant
from kernels_cuda.routing import router
from lora_server.device.protocol.cuda import CudaGpu
from lora_server.device.client.put import try_out
device = torch.device("cuda", 0)
"""
IMPORTER = """
import sys, cupy
pointer = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, int(sys.argv[2]), None, 0), 0)
assert int(cupy.ndarray((int(sys.argv[2]),), cupy.uint8, memory).min()) == 7
"""


def tool(command: tuple[str, ...]) -> str:
    """Return the first line with a version that a tool prints, or the reason why there is none."""
    if shutil.which(command[0]) is None:
        return "not on the PATH"
    try:
        done = subprocess.run(children.own(command), capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "no answer within 30 s"
    said = (done.stdout + done.stderr).strip().splitlines()
    versions = [line.strip() for line in said if re.search(r"\d+\.\d+", line)]
    return (versions or said or ["it says nothing"])[0][:200]


def attributes() -> dict[str, Any]:
    """Read the first GPU's attributes by the driver's own names; None for one that this driver does not know."""
    from cuda.bindings import driver

    (error,) = driver.cuInit(0)
    if int(error):
        raise RuntimeError(f"cuInit: {error}")
    _, version = driver.cuDriverGetVersion()
    found: dict[str, Any] = {"cuda_of_the_driver": version}
    for name, attribute in ATTRIBUTES.items():
        number = getattr(driver.CUdevice_attribute, attribute, None)
        error, value = driver.cuDeviceGetAttribute(number, 0) if number is not None else (1, None)
        found[name] = value if not int(error) else None
    return found


def vmm_export() -> str:
    """Memory made by cuMemCreate, exported as a file descriptor."""
    import torch
    from cuda.bindings import driver

    torch.zeros(1, device="cuda")  # a context
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted.requestedHandleTypes = kind
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = checked(driver.cuMemGetAllocationGranularity(wanted, least))
    handle = checked(driver.cuMemCreate(granularity, wanted, 0))
    descriptor = checked(driver.cuMemExportToShareableHandle(handle, kind, 0))
    os.close(int(descriptor))
    checked(driver.cuMemRelease(handle))
    return f"works, in multiples of {granularity} bytes"


def checked(answer: tuple[Any, ...]) -> Any:
    """The result of a driver's call; raises RuntimeError with its error."""
    error, *result = answer
    if int(error):
        raise RuntimeError(str(error))
    return result[0] if result else None


def legacy_ipc() -> str:
    """cudaIpcGetMemHandle, opened by another process."""
    import cupy

    memory = cupy.full(IPC_BYTES, 7, cupy.uint8)
    cupy.cuda.runtime.deviceSynchronize()
    handle = cupy.cuda.runtime.ipcGetMemHandle(memory.data.ptr)
    command = [sys.executable, "-c", IMPORTER, handle.hex(), str(IPC_BYTES)]
    done = subprocess.run(children.own(command), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the other process said nothing"])[-1])
    return "works"


def attempt(probe: Callable[[], Any]) -> Any:
    """Return a probe's finding, or a text that says why it did not work."""
    try:
        return probe()
    except Exception as problem:
        return f"does not work: {type(problem).__name__}: {problem}"[:300]


def compile_one(name: str) -> dict[str, Any]:
    """One module in a process of its own; CuPy keeps what NVRTC makes."""
    began = time.monotonic()
    command = [sys.executable, "-c", PRELUDE + COMPILED[name]]
    try:
        done = subprocess.run(children.own(command), capture_output=True, text=True, timeout=COMPILE_SECONDS, cwd=ROOT)
        reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
    except subprocess.TimeoutExpired:
        reason = f"not done within {COMPILE_SECONDS:g} s"
    return {"name": name, "seconds": round(time.monotonic() - began, 1), **({"reason": reason} if reason else {})}


def check(*_: object) -> None:
    """Check that each line is Python, and that our names in it still exist."""
    names: dict[str, Any] = {}
    for line in PRELUDE.splitlines():
        if line.startswith("from "):
            exec(line, names)
    for text in COMPILED.values():
        compile(PRELUDE + text, "compiled", "exec")
    compile(IMPORTER, "importer", "exec")
    latencies.source()


def work(record: Record, _: argparse.Namespace) -> bool:
    """Whether the modules that the server itself needs compile; everything else is only written down."""
    import torch

    priorities = list(torch.cuda.Stream(0).priority_range())
    record.add("hardware", **hardware(), compute_capability=list(torch.cuda.get_device_capability(0)))
    record.add("tools", **{name: tool(command) for name, command in TOOLS.items()})
    record.add("driver", **(attributes() if stage.installed("cuda.bindings") else {}), stream_priorities=priorities)
    vmm = attempt(vmm_export) if stage.installed("cuda.bindings") else "no cuda.bindings here"
    record.add("memory", legacy_ipc=attempt(legacy_ipc), vmm_export=vmm)
    record.add("latencies", of_one_thread=attempt(latencies.latencies))
    good = True
    with ThreadPoolExecutor(max(1, min(len(COMPILED), (os.cpu_count() or 2) - 2))) as pool:
        for line in pool.map(compile_one, COMPILED):
            must = line["name"] in NEEDED
            good = good and not (must and "reason" in line)
            record.add("compiled", **line, **({"good": "reason" not in line} if must else {}))
    for name, registers_of in (("serving", registers.of_serving), ("steps", registers.of_steps)):
        found = attempt(registers_of)
        record.add("registers", of=name, **(found if isinstance(found, dict) else {"reason": found}))
    return good


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",), check=check)
