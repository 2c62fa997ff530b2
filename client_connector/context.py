"""What the hooks of one engine's model share: its client, and the batch of the forward pass under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from client_connector.client import Client
from client_connector.exchange import Exchange, GemmTimes, Window
from client_connector.routing import Batch, Message, route_dense, route_experts
from lora_server.spec import Site
from lora_server.transport.session import Terms


@dataclass
class Context:
    """One attached model. `batch` is None outside a forward pass, and for one of base rows only."""

    client: Client
    batch: Batch | None = None
    observe_gemm: Callable[[GemmTimes], None] | None = None
    _owners: dict[tuple[Terms, int], torch.Tensor] = field(default_factory=dict)

    @property
    def max_entries(self) -> int:
        """Entries that one message may hold."""
        return self.client.terms.max_step_rows

    def owners(self, layer: int) -> torch.Tensor:
        """Shard of each expert of a layer; int64."""
        key = (self.client.terms, layer)  # after joining anew the layout may be another
        if key not in self._owners:
            self._owners[key] = torch.tensor(self.client.placement.owners(Site(layer, "gate_up")))
        return self._owners[key]

    def route_experts(self, site: Site, experts_Tk: torch.Tensor) -> list[Message]:
        """Messages of an expert site; empty where the batch has no delta."""
        batch = self.batch.at(site) if self.batch is not None else None
        if batch is None:
            return []
        return route_experts(batch, experts_Tk.cpu(), self.owners(site.layer), self.max_entries)

    def start_dense(self, site: Site, x_TK: torch.Tensor, window: Window | None = None) -> Exchange | None:
        """Push a dense site's rows; None where the batch has no delta."""
        batch = self.batch.at(site) if self.batch is not None else None
        if batch is None:
            return None
        messages = route_dense(batch, self.client.placement.owner(site), self.max_entries)
        return self.client.start(site, messages, x_TK, decode=batch.decode, window=window)

    def timed(self, site: Site, began_ns: int) -> None:
        """Report the engine's own GEMM of a site."""
        if self.observe_gemm is not None and self.batch is not None:
            self.observe_gemm(GemmTimes(site, self.batch.decode, began_ns, time.monotonic_ns()))
