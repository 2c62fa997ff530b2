"""Registers of kernels as the driver loaded them, and which client kernels find no room beside one that serves."""

from __future__ import annotations

from typing import Any

from kernels_cuda.residency import ThreadBlock, fit


def of_serving() -> dict[str, Any]:
    """Read the registers of kernels that serve, put, wait or add. `no_room`: clients' kernels that do not fit."""
    import torch

    from lora_server.device.protocol.cuda import CudaGpu
    from lora_server.device.protocol.source import ONE_WARP, SERVES

    gpu = CudaGpu(torch.device("cuda", 0))
    of: dict[str, int] = {}
    for kernel, source in gpu.kernels.items():
        if source in (*SERVES, "link.cu", "put.cu"):
            of[kernel] = int(gpu.functions.function(kernel).num_regs)
    shared = {source: gpu.functions.shared_bytes(source) for source in set(gpu.kernels.values())}

    def block(kernel: str) -> ThreadBlock:
        source = gpu.kernels[kernel]
        warps = 1 if kernel in ONE_WARP else gpu.functions.variant(source).warps + (source in SERVES)
        return ThreadBlock(warps, of[kernel], shared[source])

    serving = [kernel for kernel in of if gpu.kernels[kernel] in SERVES]
    clients = [kernel for kernel in of if kernel not in serving]
    return {**of, "no_room": crowded({one: block(one) for one in serving}, {one: block(one) for one in clients})}


def crowded(serving: dict[str, ThreadBlock], clients: dict[str, ThreadBlock]) -> list[str]:
    """List the client kernels that do not fit beside a serving kernel, and beside which."""
    return [
        f"{client} beside {server}"
        for server, large in serving.items()
        for client, small in clients.items()
        if not fit([large, small])
    ]


def of_steps() -> dict[str, int]:
    """Read the registers of each kernel that a host launches for a step."""
    import torch

    from kernels_cuda.cuda import kernels
    from kernels_cuda.launch import DTYPE_NAMES
    from kernels_cuda.routing import router

    device = torch.device("cuda", 0)
    found = {"route": int(router(device)._function.num_regs)}
    for dtype, name in DTYPE_NAMES.items():
        for kernel in ("lora_step", "shrink", "expand"):
            kernels(device).compile(dtype, kernel)
            found[f"{kernel}_{name}"] = int(kernels(device)._functions[kernel, dtype].num_regs)
    return found
