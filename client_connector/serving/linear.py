"""Dense sites of a serving engine's worker: opaque torch ops around a layer's GEMM, also inside torch.compile.

    token = push(x, site);  y = W x;  add_(y, x, token, site)

`add_` takes the token, so that it runs after `push`, and x, so that x's memory is not reused before its rows are sent.
Kernels that send and wait by themselves (`launched`) are captured with the rest. A host-side exchange cannot be, so the
engine then splits its graphs at the ops named in NAMES. In eager mode the same functions are called directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from client_connector.exchange import Started
from client_connector.packing import Window
from client_connector.serving.planned import PlannedPass
from lora_server.spec import Site

NAMES = ("lora_server::push", "lora_server::add_")
_LINEARS: list[RemoteLinear] = []  # an op's argument must be a number; engines live as long as their process


@dataclass
class RemoteLinear:
    """One linear layer of an engine worker, and the step under way there."""

    forward: PlannedPass
    site: Site
    window: Window
    _step: Started | None = None

    def push(self, x_TK: torch.Tensor, pass_rows_T: torch.Tensor | None = None) -> None:
        """Push the rows, which are the pass's unless `pass_rows_T` says which; call it before the GEMM."""
        self._step = self.forward.sites.start_dense(self.site, x_TK, self.window, pass_rows_T)

    def add(self, y_TO: torch.Tensor) -> None:
        """Add the deltas after the GEMM, and before any all-reduce, which then sums partial deltas."""
        step, self._step = self._step, None
        self.forward.sites.add(step, [(y_TO, 0)])

    def around(self, gemm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `gemm(layer, x, bias)` so that the deltas of the site are added to its result."""
        push, add = _ops()
        _LINEARS.append(self)
        index = len(_LINEARS) - 1

        def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if torch.compiler.is_compiling():
                token = push(x, index)
                y = gemm(layer, x, bias)
                add(y, x, token, index)
                return y
            if not self.forward.sites.active:
                return gemm(layer, x, bias)
            self.push(x.reshape(-1, x.shape[-1]))
            y = gemm(layer, x, bias)
            self.add(y.view(-1, y.shape[-1]))
            return y

        return apply


def _push(x: torch.Tensor, site: int) -> torch.Tensor:
    _LINEARS[site].push(x.view(-1, x.shape[-1]))
    return x.new_empty(0)


def _add(y: torch.Tensor, x: torch.Tensor, token: torch.Tensor, site: int) -> None:
    _LINEARS[site].add(y.view(-1, y.shape[-1]))


@functools.cache
def _ops() -> tuple[Callable[..., Any], Callable[..., Any]]:
    push = torch.library.custom_op("lora_server::push", _push, mutates_args=())
    push.register_fake(lambda x, site: x.new_empty(0))
    add = torch.library.custom_op("lora_server::add_", _add, mutates_args=("y",))
    add.register_fake(lambda y, x, token, site: None)
    return push, add
