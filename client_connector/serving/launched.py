"""The forward pass of an engine that leaves steps to kernels from end to end: route, put, wait and add are launches,
which a CUDA graph may hold. Their arguments never change: what does change is in StepTables and in the state block of
each link.

    forward.begin(...)                       the tables: one copy, behind what the engine has queued
        step = sites.start_dense(site, x)    route + put on every shard's queue, beside the engine's GEMM
        sites.add(step, [(y, 0)])            wait + add behind it
    failures = forward.end()                 once per pass: what the state blocks say

A graph is captured in `rehearse`, without rows of adapters: nothing is sent. A replayed one sends what the tables say.
Over base weights that contain an adapter each site has two halves: x through the rows' own adapters, and -x, which is
minus the delta, through the merged one.
Shapes: T rows of the engine's step, k experts each; a chunk is as many of them as fit a message in any routing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import structlog
import torch
from typing_extensions import override

from client_connector.client import Client
from client_connector.exchange import Started
from client_connector.packing import Window, code_of
from client_connector.routing import Batch
from client_connector.serving.kernel_links import KernelLinks, kernel_links
from client_connector.serving.launches import ChunkLaunch, Launched, header_of
from client_connector.serving.planned import PlannedPass
from client_connector.serving.sites import Part, PassFailures, SiteSteps
from client_connector.serving.tables import StepTables
from client_connector.serving.watchdog import Watchdog
from kernels_cuda.routing import MAX_KEYS, Choice, Route
from lora_server.device.client.captured import CapturedSite
from lora_server.errors import AdapterError, AdapterNotLoadedError, ConfigError, LoraServerError
from lora_server.spec import PROJECTIONS, Site
from lora_server.timings import Timings
from lora_server.wire.terms import Terms

DTYPES = (torch.bfloat16, torch.float16)
log = structlog.get_logger()
Owners = Sequence[tuple[int, range | None]]  # shards, and their experts; None: the site has one weight


class CapturedSites:
    """The launches of each site, made at its first pass; graphs keep their addresses.

    The first pass is a rehearsal wherever graphs are captured.
    """

    def __init__(self, links: KernelLinks, dtype: torch.dtype) -> None:
        self._links, self._dtype = links, dtype
        most = max(links.pairs, links.terms.spec.experts)  # a token's experts are in one chunk
        self._routes = [
            [Route.empty(most, links.device, max_rows=most) for _ in range(links.depth)] for _ in links.captured
        ]
        self._sites: dict[tuple[Any, ...], CapturedSite] = {}

    def get(
        self, site: Site, shard: int, x: torch.Tensor, by_entry: bool, window: Window, in_flight: int
    ) -> CapturedSite:
        """Return a site's launches on a shard. `in_flight`: which of the chunks that are sent at the same time."""
        key = (site, shard, x.shape[1], by_entry, window, in_flight)
        if key not in self._sites:
            header = header_of(site, code_of(self._links.terms, self._dtype), x.shape[1], by_entry, window)
            route = self._routes[shard][in_flight]
            self._sites[key] = self._links.captured[shard].site(header, x, route, by_entry)
        return self._sites[key]


class KernelSites(SiteSteps):
    """Launches per site, over links of transport gpu or nvshmem."""

    def __init__(
        self,
        client: Client,
        failures: PassFailures,
        *,
        dtype: torch.dtype,
        max_rows: int,
        max_adapters: int,
        merged: bool = False,
    ) -> None:
        """max_rows: of an engine's step, padding included; max_adapters: in one; merged: another one is in the base
        weights. Raises ConfigError."""
        max_adapters += merged
        check_launches(client.terms, dtype, max_adapters)
        device = kernel_links(client)[0].device
        self._failures, self._dtype = failures, dtype
        self._tables = StepTables(list(client.terms.spec.sites()), max_rows, max_adapters, device, merged)
        self._expert_T1 = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)  # of a dense site
        self.links = KernelLinks(client, self._tables.live, max_rows, 1 + merged)
        rows, max_step_rows = max_adapters * client.terms.spec.top_k, client.terms.max_step_rows
        if rows > self.links.pairs == max_step_rows:
            log.warning(
                "a decoding step takes several messages, each of which reads its adapters' weights again; "
                "start the server with a larger --max-step-rows",
                rows=rows,
                max_step_rows=max_step_rows,
            )
        self._captured = CapturedSites(self.links, dtype)
        self._rehearsal: bool | None = None  # one is under way: whether of passes with adapters
        self._watchdog = Watchdog(self.links.look)

    # -- once per forward pass

    @override
    def begin(self, batch: Batch | None) -> None:
        self.batch = batch
        if batch is not None:
            try:
                if self.links.adopt():
                    self._tables.forget()
                self._tables.write(batch)
            except LoraServerError as error:
                self._fail(error)
        if self.batch is None:
            self._tables.write(None)
        else:
            self._watchdog.wake()

    @override
    def end(self) -> None:
        if self.batch is not None:
            self.links.gpu.settle()
            self._watchdog.sleep()
            self._judge()
        self.batch = None

    @contextlib.contextmanager
    @override
    def rehearse(self, with_adapters: bool) -> Iterator[None]:
        self._tables.write(None)
        self._rehearsal = with_adapters
        try:
            yield
        finally:
            self._rehearsal = None

    @property
    @override
    def active(self) -> bool:
        return self._rehearsal is not None or super().active

    @override
    def close(self) -> None:
        self._watchdog.close()

    def _fail(self, error: LoraServerError) -> None:
        self.batch = None
        self._failures.fail(error)

    def _judge(self) -> None:
        """Fail the pass if something went wrong in it, and find out which adapters are to blame."""
        wrong = self.links.errors()
        if not wrong:
            return
        captured, worst = min(wrong, key=lambda one: isinstance(one[1], AdapterError))
        self._fail(worst)
        if isinstance(worst, AdapterNotLoadedError):
            self._failures.spare(dict.fromkeys(worst.handles, worst))
        elif isinstance(worst, AdapterError):
            last = captured.last()
            site = Site(last.layer, PROJECTIONS[last.projection])
            self._failures.spare_innocent(site, lambda handle: self.links.probe(captured, last, self._dtype, handle))

    # -- at a site

    @override
    def start_dense(
        self, site: Site, x_TK: torch.Tensor, window: Window | None = None, pass_rows_T: torch.Tensor | None = None
    ) -> Launched | None:
        owners: Owners = [(self.links.terms.placement.owners(site)[0], None)]
        return self._start(site, self._expert_T1[: len(x_TK)], x_TK, None, window, owners, pass_rows_T)

    @override
    def start_experts(
        self,
        site: Site,
        experts_Tk: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor | None = None,
        window: Window | None = None,
        pass_rows_T: torch.Tensor | None = None,
    ) -> Launched | None:
        placement = self.links.terms.placement
        owners = [(one, placement.experts(site, one)) for one in placement.layout.stage_shards(site.layer)]
        weights_Tk = None if weights is None else weights.view(experts_Tk.shape)
        owners = [(shard, own) for shard, own in owners if len(own)]
        return self._start(site, experts_Tk.int().contiguous(), x, weights_Tk, window, owners, pass_rows_T)

    @override
    def add(self, step: Started | None, parts: Sequence[Part], per_entry: bool = False) -> None:
        if step is not None:
            assert isinstance(step, Launched)
            step.add(parts, per_entry)

    def _start(
        self,
        site: Site,
        experts_Tk: torch.Tensor,
        x: torch.Tensor,
        weights_Tk: torch.Tensor | None,
        window: Window | None,
        owners: Owners,
        pass_rows_T: torch.Tensor | None,
    ) -> Launched | None:
        if self._rehearsal is None and (self.batch is None or self.batch.at(site) is None):
            return None
        links, spec = self.links, self.links.terms.spec
        window = window or Window(0, ((0, spec.out_width(site)),))
        (rows, top_k), by_entry = experts_Tk.shape, weights_Tk is not None
        x, per_row = x if x.stride(1) == 1 else x.contiguous(), top_k if by_entry else 1
        owners, size = [*owners, *links.others(site, owners)], max(1, links.pairs // top_k)
        adapters_HT, directory = self._tables.adapters_at(pass_rows_T), self._tables.directory(site)
        halves = [(x, adapters_HT[0]), *((-x, subtracted_T) for subtracted_T in adapters_HT[1:])]
        captured = [
            [(self._captured.get(site, shard, x, by_entry, window, one), among) for shard, among in owners]
            for one in range(min(links.depth, len(halves) * -(-rows // size)))
        ]
        if self._rehearsal is False:
            return None  # what a later capture needs is there
        num_experts = spec.experts if owners[0][1] is not None else 1
        chunks: list[ChunkLaunch] = []
        for (sent, adapters_T), first in product(halves, range(0, rows, size)):
            part = slice(first, min(first + size, rows))
            x_part, weights = (
                sent[first * per_row : part.stop * per_row],
                None if weights_Tk is None else weights_Tk[part],
            )
            on = [
                (its.of(x_part), Choice(experts_Tk[part], weights, adapters_T[part], directory, num_experts, among))
                for its, among in captured[len(chunks) % links.depth]
            ]
            chunks.append(ChunkLaunch(first, part.stop - first, on))
        step = Launched(chunks, top_k, links.depth, len(halves) > 1)
        step.put()
        return step


class LaunchedPass(PlannedPass):
    """A PlannedPass with KernelSites: every exchange is a row of kernel launches."""

    sites: KernelSites

    def __init__(
        self,
        client: Client,
        ready: Callable[[], bool],
        *,
        dtype: torch.dtype,
        max_rows: int,
        max_adapters: int,
        merged: bool = False,
        outage_seconds: float = Timings.outage_step,
    ) -> None:
        """See KernelSites."""

        def make(client: Client, failures: PassFailures) -> KernelSites:
            return KernelSites(
                client, failures, dtype=dtype, max_rows=max_rows, max_adapters=max_adapters, merged=merged
            )

        super().__init__(client, ready, outage_seconds, make)

    def sent(self) -> list[int]:
        """See KernelLinks.sent."""
        return self.sites.links.sent()


def check_launches(terms: Terms, dtype: torch.dtype, max_adapters: int) -> None:
    """Check what needs no links; raises ConfigError for what launches cannot do."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"transports gpu and nvshmem: got {dtype} activations, expected bfloat16 or float16; use auto"
        )
    if max_adapters * terms.spec.experts >= MAX_KEYS:
        raise ConfigError(
            f"transports gpu and nvshmem: got steps of up to {max_adapters} requests and {terms.spec.experts} experts, "
            f"expected fewer than {MAX_KEYS} together; give the engine fewer requests at once, or use auto"
        )
