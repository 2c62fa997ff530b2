"""One engine's model at work: its client, the batch of the forward pass under way, and each site's exchange.

    exchange = forward.start_dense(site, x)      before the engine's own GEMM; None where there is nothing to do
    forward.finish(exchange, add)                after it

An error of ours goes to `failed`, which decides what it means: here it ends the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from client_connector.client import Client
from client_connector.exchange import Exchange, GemmTimes, Started
from client_connector.packing import Activations, HostPacker, Window
from client_connector.routed import RoutedPacker, chunks_of, fits
from client_connector.routing import Batch, Message, route_dense, route_experts
from lora_server.errors import LoraServerError
from lora_server.placement import Placement
from lora_server.spec import Site


class ForwardPass:
    """The forward passes of one attached model. `batch` is None outside a pass, and in a pass of base rows only."""

    waits_for_weights = True  # a step waits for weights that are loading, and with it every row of the pass

    def __init__(self, client: Client) -> None:
        self.client = client
        self.batch: Batch | None = None
        self.observe_gemm: Callable[[GemmTimes], None] | None = None
        self._owners: dict[tuple[Placement, int], torch.Tensor] = {}

    def start_dense(
        self, site: Site, x_TK: torch.Tensor, window: Window | None = None, pass_rows_T: torch.Tensor | None = None
    ) -> Started | None:
        """Push the rows of a site with one weight for all rows; None where the batch has no delta.

        `pass_rows_T`: see Batch.at; waits for the device if it is there.
        """
        batch = self.batch.at(site, pass_rows_T) if self.batch is not None else None
        if batch is None:
            return None
        try:
            self.client.step()
            here = self.client.lanes.takes(x_TK.device)
            is_routed_there = here and batch.weights_R is None
            rows = batch.on(x_TK.device, len(x_TK)).rows_R if is_routed_there else None
            messages = route_dense(batch, self.client.placement.owners(site)[0], self.client.terms.max_step_rows, rows)
            x = x_TK if here else self.staged(x_TK)
            given = Activations(x=x, decode=batch.decode, window=window, waits=self.waits_for_weights)
            return self.client.start(HostPacker(self.client.terms, site, given), messages)
        except LoraServerError as error:
            self.client.end_step()
            self.failed(error, None)
            return None

    def start_experts(
        self,
        site: Site,
        experts_Tk: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor | None = None,
        window: Window | None = None,
        pass_rows_T: torch.Tensor | None = None,
    ) -> Started | None:
        """Push the rows of an expert site; expert ids of E and above stand for no expert.

        Without `weights` x is [T, K]. With them, float32 [T * k], x is [T * k, K], and deltas come back weighted
        and summed per row. `pass_rows_T`: see start_dense.
        """
        batch = self.batch.at(site, pass_rows_T) if self.batch is not None else None
        if batch is None:
            return None
        try:
            self.client.step()
            given = Activations(
                x=x,
                decode=batch.decode,
                by_pair=weights is not None,
                weights=weights,
                window=window,
                waits=self.waits_for_weights,
            )
            client, terms = self.client, self.client.terms
            if not (client.lanes.takes(x.device) and fits(batch, terms.spec.experts)):
                return self._start_on_host(batch, site, experts_Tk, given)
            weights_Tk = None if weights is None else weights.view(experts_Tk.shape)
            chunks = chunks_of(batch, client.placement, site, experts_Tk, weights_Tk, terms.max_step_rows)
            return client.start(RoutedPacker(terms, site, given), chunks)
        except LoraServerError as error:
            self.client.end_step()
            self.failed(error, None)
            return None

    def _start_on_host(self, batch: Batch, site: Site, experts_Tk: torch.Tensor, given: Activations) -> Exchange | None:
        """Route on the host, which waits for the device if there is one."""
        owners, limit = self._owners_of(site.layer), self.client.terms.max_step_rows
        messages = route_experts(batch, experts_Tk.cpu().long(), owners, limit)
        if not messages:
            self.client.end_step()
            return None
        weights = None if given.weights is None else given.weights.cpu()
        given = replace(given, x=self.staged(given.x), weights=weights)
        return self.client.start(HostPacker(self.client.terms, site, given), messages)

    def finish(self, exchange: Started | None, add: Callable[[Message, torch.Tensor], None]) -> None:
        """Wait for the deltas of a site and pass them to `add`, which must copy what it keeps."""
        if exchange is None:
            return
        assert isinstance(exchange, Exchange)
        try:
            if self.batch is not None:
                exchange.finish(add)
        except LoraServerError as error:
            self.failed(error, exchange)
        finally:
            self.client.end_step()

    def failed(self, error: LoraServerError, exchange: Exchange | None) -> None:
        """Handle an error of starting an exchange, or of finishing it if it is given."""
        raise error

    def staged(self, x: torch.Tensor) -> torch.Tensor:
        """Copy activations to where the transport takes them from."""
        return x

    def _owners_of(self, layer: int) -> torch.Tensor:
        """Return the shard of each expert of a layer; int64."""
        key = (self.client.placement, layer)  # a session that was joined again may have another
        if key not in self._owners:
            self._owners[key] = torch.tensor(self.client.placement.first_owners(Site(layer, "gate_up")))
        return self._owners[key]

    def timed(self, site: Site, began_ns: int) -> None:
        """Report the engine's own GEMM of a site."""
        if self.observe_gemm is not None and self.batch is not None:
            self.observe_gemm(GemmTimes(site, self.batch.decode, began_ns, time.monotonic_ns()))
