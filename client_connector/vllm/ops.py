"""Opaque torch ops around a dense GEMM, so that torch.compile neither looks inside nor moves them.

    token = push(x, site);  y = W x;  add_(y, token, site)

`lora_server::push` and `lora_server::add_` belong into vLLM's `splitting_ops`: a host-side exchange
cannot run inside a captured graph. In eager mode the same functions are called directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from client_connector.exchange import Exchange, Window
from client_connector.routing import Message
from client_connector.vllm.staging import add_rows
from client_connector.vllm.step import Step
from lora_server.spec import Site

NAMES = ("lora_server::push", "lora_server::add_")
_SITES: list[DenseSite] = []  # an op's argument must be a number; engines live as long as their process


@dataclass
class DenseSite:
    """One linear layer of an engine worker."""

    step: Step
    site: Site
    window: Window
    _exchange: Exchange | None = None

    def push(self, x_TK: torch.Tensor) -> None:
        """Before the GEMM."""
        self._exchange = self.step.start_dense(self.site, x_TK, self.window) if self.step.active else None

    def add(self, y_TO: torch.Tensor) -> None:
        """After it; before any all-reduce, which then sums partial deltas too."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return

        def add(message: Message, delta: torch.Tensor) -> None:
            add_rows(y_TO, message.rows_M, delta)

        self.step.finish(exchange, add)


def split_graphs(compilation_config: Any) -> Any:
    """Changes vLLM's CompilationConfig so that no piece holds an exchange, which happens on the host."""
    if compilation_config.splitting_ops is None:
        compilation_config.splitting_ops = list(compilation_config._attention_ops)
    wanted = [*NAMES, "vllm::moe_forward", "vllm::moe_forward_shared"]
    compilation_config.splitting_ops += [op for op in wanted if op not in compilation_config.splitting_ops]
    return compilation_config


def _push(x: torch.Tensor, site: int) -> torch.Tensor:
    _SITES[site].push(x.view(-1, x.shape[-1]))
    return x.new_empty(0)


def _add(y: torch.Tensor, token: torch.Tensor, site: int) -> None:
    _SITES[site].add(y.view(-1, y.shape[-1]))


@functools.cache
def _ops() -> tuple[Callable[..., Any], Callable[..., Any]]:
    push = torch.library.custom_op("lora_server::push", _push, mutates_args=())
    push.register_fake(lambda x, site: x.new_empty(0))
    add = torch.library.custom_op("lora_server::add_", _add, mutates_args=("y",))
    add.register_fake(lambda y, token, site: None)
    return push, add


def around(dense: DenseSite, gemm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`gemm(layer, x, bias)` with the deltas of a site added to its result."""
    push, add = _ops()
    _SITES.append(dense)
    index = len(_SITES) - 1

    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            token = push(x, index)
            y = gemm(layer, x, bias)
            add(y, token, index)
            return y
        if not dense.step.active:
            return gemm(layer, x, bias)
        dense.push(x.reshape(-1, x.shape[-1]))
        y = gemm(layer, x, bias)
        dense.add(y.view(-1, y.shape[-1]))
        return y

    return apply
