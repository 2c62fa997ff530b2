"""The sites of a serving engine's model during one forward pass, with an exchange of the host's at each.

    sites.begin(batch)                               once per pass
        step = sites.start_dense(site, x, ...)       before the engine's own GEMM
        sites.add(step, [(y, 0)])                    after it
    sites.end()

`launched` does the same by kernels alone. A failure never raises into the engine: the rest of the pass runs without
deltas, and `PassFailures` names the requests with void results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import structlog
import torch
from typing_extensions import override

from client_connector.client import Client
from client_connector.exchange import Exchange, Started
from client_connector.forward_pass import ForwardPass
from client_connector.packing import Activations, HostPacker, Window
from client_connector.routing import Batch, Message, probe_messages
from client_connector.serving.plan import RETRY, Assigned, Failure
from lora_server.errors import AdapterError, AdapterNotLoadedError, LoraServerError
from lora_server.logs import Repeats
from lora_server.spec import Site
from lora_server.wire.terms import Held

Part = tuple[torch.Tensor, int]  # columns of an engine's result, and the first of the answer's that belong there
log = structlog.get_logger()


class PassFailures:
    """The requests of one forward pass that did not get their adapter's delta, each with its failure."""

    def __init__(self) -> None:
        self.by_request: dict[str, Failure] = {}
        self._planned: tuple[str, ...] = ()
        self._adapters: Mapping[str, Held] = {}
        self._complain = Repeats(log.warning)

    def clear(self) -> None:
        """Forget the failures of the pass before."""
        self.by_request = {}
        self._complain.flush()

    def watch(self, planned: Mapping[str, Assigned], known: Mapping[int, Held]) -> None:
        """Begin a pass with these requests; adapters that are not known count for `fail` alone."""
        self._planned = tuple(planned)
        self._adapters = {one: known[assigned.handle] for one, assigned in planned.items() if assigned.handle in known}

    def fail(self, error: LoraServerError) -> None:
        """Void the pass for every request with an adapter."""
        self._complain(error.code, "adapter rows failed", requests=len(self._planned), error=str(error))
        self.by_request = {request: Failure.of(error) for request in self._planned}

    def spare_innocent(self, site: Site, probe: Callable[[int], None]) -> None:
        """Find the bad adapters of a failed step at `site`: probe each alone, and retry the other requests."""
        errors: dict[int, LoraServerError] = {}
        for held in {held.handle: held for held in self._adapters.values()}.values():
            try:
                if site in held.sites:
                    probe(held.handle)
            except AdapterError as error:
                errors[held.handle] = error
            except LoraServerError:
                return  # the server is going away: all have failed
        self.spare(errors)

    def spare(self, errors: Mapping[int, LoraServerError]) -> None:
        """Fail the requests of these adapters, by handle, and retry the others; without an error all have failed."""
        for request, held in self._adapters.items() if errors else ():
            own = errors.get(held.handle)
            named = None if own is None else Failure(own.code, f"adapter {held.name!r}: {own}")
            self.by_request[request] = named or Failure(RETRY, "")


class SiteSteps(ABC):
    """The calls of an engine's layer around its GEMM; one thread. Without a `batch` all rows are the base model's."""

    batch: Batch | None = None

    @property
    def active(self) -> bool:
        """Whether a pass with adapter rows is under way."""
        return self.batch is not None

    def begin(self, batch: Batch | None) -> None:
        """Begin a pass."""
        self.batch = batch

    def end(self) -> None:
        """End the pass; all its failures are known."""
        self.batch = None

    def rehearse(self, with_adapters: bool) -> AbstractContextManager[None]:
        """Enclose passes without requests, in which an engine warms up and captures graphs.

        `with_adapters`: the graphs serve steps with adapters.
        """
        return nullcontext()

    @abstractmethod
    def start_dense(
        self, site: Site, x_TK: torch.Tensor, window: Window | None = None, pass_rows_T: torch.Tensor | None = None
    ) -> Started | None:
        """See ForwardPass."""

    @abstractmethod
    def start_experts(
        self,
        site: Site,
        experts_Tk: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor | None = None,
        window: Window | None = None,
        pass_rows_T: torch.Tensor | None = None,
    ) -> Started | None:
        """See ForwardPass."""

    @abstractmethod
    def add(self, step: Started | None, parts: Sequence[Part], per_entry: bool = False) -> None:
        """Add a step's answer to an engine's result: to a row per token, or per token and expert."""

    def close(self) -> None:  # noqa: B027  (most have nothing to stop)
        """Stop; the client is left afterwards."""


class HostSites(ForwardPass, SiteSteps):
    """An exchange of the host's per site."""

    waits_for_weights = False  # the engine schedules a request once its adapter is loaded: others do not wait

    def __init__(self, client: Client, failures: PassFailures) -> None:
        super().__init__(client)
        self._failures = failures
        self._buffer = torch.empty(0, dtype=torch.uint8)  # pinned; an exchange is finished before the next one begins

    @override
    def add(self, step: Started | None, parts: Sequence[Part], per_entry: bool = False) -> None:
        def add(message: Message, delta: torch.Tensor) -> None:
            for y, begin in parts:
                rows_M = message.pairs_P if per_entry else message.rows_M
                delta_MO = delta[:, begin : begin + y.shape[1]]  # a slot's memory, which is used again
                y.index_add_(0, rows_M.to(y.device, non_blocking=True), delta_MO.to(y.device, non_blocking=True))

        self.finish(step, add)

    @override
    def failed(self, error: LoraServerError, exchange: Exchange | None) -> None:
        self.batch = None
        self._failures.fail(error)
        if isinstance(error, AdapterNotLoadedError):
            self._failures.spare(dict.fromkeys(error.handles, error))
        elif exchange is not None and isinstance(error, AdapterError):
            self._failures.spare_innocent(exchange.site, lambda handle: _probe(self.client, exchange, handle))

    @override
    def staged(self, x: torch.Tensor) -> torch.Tensor:
        """Copy x to the host; waits for the current stream only, so that a GEMM on another one goes on."""
        if x.device.type == "cpu":
            return x
        if self._buffer.numel() < x.nbytes:
            self._buffer = torch.empty(x.nbytes, dtype=torch.uint8, pin_memory=True)
        staged = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        staged.copy_(x, non_blocking=True)
        torch.cuda.current_stream(x.device).synchronize()
        return staged


def _probe(client: Client, like: Exchange, handle: int) -> None:
    """Send a row of zeros through one adapter, at the site of another exchange; raises the adapter's error."""
    given = like.packer.given
    one = Activations(x=torch.zeros_like(given.x[:1]), decode=True, window=given.window, waits=given.waits)
    messages = probe_messages(client.placement, like.site, handle)
    client.start(HostPacker(client.terms, like.site, one), messages).finish(lambda message, delta: None)
