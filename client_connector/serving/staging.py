"""Activations of an engine on a GPU, on their way to slots in host memory and back; on a CPU nothing is done."""

from __future__ import annotations

import torch


class Staging:
    """One pinned buffer, reused: an exchange is finished before the next one begins."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def host(self, x: torch.Tensor) -> torch.Tensor:
        """x on the host; waits for the current stream only, so that a GEMM on another one goes on."""
        if x.device.type == "cpu":
            return x
        if self._buffer.numel() < x.nbytes:
            self._buffer = torch.empty(x.nbytes, dtype=torch.uint8, pin_memory=True)
        staged = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        staged.copy_(x, non_blocking=True)
        torch.cuda.current_stream(x.device).synchronize()
        return staged


def add_rows(y: torch.Tensor, rows_M: torch.Tensor, delta_MO: torch.Tensor) -> None:
    """y[rows] += delta, wherever y is. `delta` is a slot's memory, which is used again."""
    y.index_add_(0, rows_M.to(y.device, non_blocking=True), delta_MO.to(y.device, non_blocking=True))
