"""Dense sites: forward hooks on the Linear modules of attention and of an MLP without experts.

The modules of a site read the same activations, which are pushed once, before the first of them
runs; its delta is awaited after that module's own GEMM, and each module adds its section.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from client_connector.exchange import Started
from client_connector.forward_pass import ForwardPass
from client_connector.routing import Message
from lora_server.errors import ProtocolError
from lora_server.spec import Section, Site


@dataclass
class DenseSite:
    """The Linear modules of one site, in the order of its sections, and the exchange under way."""

    forward: ForwardPass
    site: Site
    modules: Sequence[nn.Module]
    sections: Sequence[Section]
    _input: torch.Tensor | None = None
    _exchange: Started | None = None
    _deltas: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # rows, delta
    _began_ns: int = 0

    def install(self) -> list[RemovableHandle]:
        """Hook every module; the handles undo it."""
        handles = []
        for index, module in enumerate(self.modules):
            handles.append(module.register_forward_pre_hook(self._before(index)))
            handles.append(module.register_forward_hook(self._after(index)))
        return handles

    def _before(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if self.forward.batch is None:
                return
            x = args[0]
            if index == 0:
                self._input, self._deltas = x, []
                self._exchange = self.forward.start_dense(self.site, x.reshape(-1, x.shape[-1]))
                self._began_ns = time.monotonic_ns()
            elif x is not self._input:
                raise ProtocolError(
                    f"{self.site}: {self.sections[index].name} reads other activations than {self.sections[0].name}; "
                    "this model's layers are not supported"
                )

        return hook

    def _after(self, index: int) -> Any:
        section = self.sections[index]

        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self.forward.batch is None:
                return
            flat = output.view(-1, output.shape[-1])
            if index == 0:
                self.forward.timed(self.site, self._began_ns)
                self._collect(flat, section)
            else:
                for rows, delta in self._deltas:
                    flat.index_add_(0, rows, delta[:, section.begin : section.end])
            if index == len(self.modules) - 1:
                self._input, self._deltas = None, []

        return hook

    def _collect(self, flat: torch.Tensor, section: Section) -> None:
        exchange, self._exchange = self._exchange, None

        def add(message: Message, delta: torch.Tensor) -> None:
            rows = message.rows_M.to(flat.device)
            flat.index_add_(0, rows, delta[:, section.begin : section.end])
            if len(self.modules) > 1:
                self._deltas.append((rows, delta.clone()))  # the slot is used again

        self.forward.finish(exchange, add)
