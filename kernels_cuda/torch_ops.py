"""The CUDA step as a torch operator, `torch.ops.lora_server.lora_step`, opaque to torch.compile and its graphs.

Importing this module registers it. It launches on the current stream, allocates nothing and reads no
device memory on the host, so that CUDA graphs can hold it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels_cuda.launch import DeviceStep, Workspace

NAME = "lora_server::lora_step"


@torch.library.custom_op(
    NAME, mutates_args=("out_UO", "partial", "v", "delta", "groups", "arrivals"), device_types="cuda"
)
def lora_step_op(
    rows_TK: torch.Tensor,
    segments: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    in_map_N: torch.Tensor | None,
    out_map_N: torch.Tensor | None,
    weights_N: torch.Tensor | None,
    out_UO: torch.Tensor,
    partial: torch.Tensor,
    v: torch.Tensor,
    delta: torch.Tensor,
    groups: torch.Tensor,
    arrivals: torch.Tensor,
    in_begin: int,
    in_width: int,
    windows: Sequence[int],
) -> None:
    """Launch a step. Arrays are those of `launch.DeviceStep` and `launch.Workspace`; windows: begin, end, begin, ..."""
    from kernels_cuda.cuda import kernels

    step = DeviceStep(
        rows_TK=rows_TK,
        segments=segments,
        blocks=blocks,
        counts=counts,
        in_map_N=in_map_N,
        out_map_N=out_map_N,
        weights_N=weights_N,
        in_begin=in_begin,
        in_width=in_width,
        windows=list(zip(windows[::2], windows[1::2], strict=True)),
    )
    workspace = Workspace(partial, v, delta, groups, arrivals)
    kernels(rows_TK.device).launch(step, out_UO, workspace)


@lora_step_op.register_fake
def _(*arguments: object) -> None:
    return None


def lora_step(step: DeviceStep, out_UO: torch.Tensor, workspace: Workspace) -> None:
    """Launch a step from code that torch.compile traces. Same contract and errors as `CudaKernels.launch`."""
    lora_step_op(
        step.rows_TK,
        step.segments,
        step.blocks,
        step.counts,
        step.in_map_N,
        step.out_map_N,
        step.weights_N,
        out_UO,
        workspace.partial,
        workspace.v,
        workspace.delta,
        workspace.groups,
        workspace.arrivals,
        step.in_begin,
        step.in_width,
        [bound for window in step.windows for bound in window],
    )
