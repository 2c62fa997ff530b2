"""The forward pass of an engine whose steps are kernels' work from end to end: route, put, wait, add are launches that
a CUDA graph may hold. Their arguments never change; what does lies in StepTables, and in the state block of each link.

    forward.begin(...)                       the tables: one copy, behind what the engine has queued
        step = forward.start_dense(site, x)  route + put on every shard's queue, beside the engine's GEMM
        forward.add(step, [(y, 0)])          wait + add behind it
    failures = forward.end()                 once per pass: what the state blocks say

A graph is captured in `rehearse`, with no row of anybody's: nothing is sent. A replayed one sends what the tables say.
Shapes: T rows of the engine's step, k experts each; a chunk is as many of them as fit a message in any routing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

from client_connector.client import Client
from client_connector.exchange import Started
from client_connector.packing import Window, code_of
from client_connector.serving.launches import NOTHING, Chunk, Launched, header_of
from client_connector.serving.planned import Part, PlannedPass
from client_connector.serving.tables import StepTables
from client_connector.serving.watchdog import Watchdog
from kernels_cuda.routing import MAX_KEYS, MAX_PAIRS, Choice, Route
from lora_server.errors import AdapterError, ConfigError, LoraServerError
from lora_server.spec import PROJECTIONS, Site
from lora_server.timings import Timings
from lora_server.transport.gpu.captured import Captured, CapturedSite
from lora_server.transport.gpu.link import KernelLink
from lora_server.transport.session import Terms
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

DTYPES = (torch.bfloat16, torch.float16)


class LaunchedPass(PlannedPass):
    """One engine worker's, over links of transport gpu or nvshmem; one thread. See PlannedPass."""

    def __init__(
        self,
        client: Client,
        ready: Callable[[], bool],
        *,
        dtype: torch.dtype,
        max_rows: int,
        max_adapters: int,
        outage_seconds: float = Timings.outage_step,
    ) -> None:
        """max_rows: of an engine's step, padding included; max_adapters: in one. Raises ConfigError."""
        super().__init__(client, ready, outage_seconds)
        terms = client.terms
        check_launches(terms, dtype, max_adapters)
        links = _kernel_links(client)
        self._gpu, self._dtype, self._terms, self._session = links[0].gpu, dtype, terms, client.session
        device = links[0].device
        self._captured = [Captured(link) for link in links]
        self._pairs = min(terms.max_step_rows, MAX_PAIRS)
        most = max(self._pairs, terms.spec.experts)  # a token's experts are in one chunk
        self._routes = [Route.empty(most, device, max_rows=most) for _ in links]
        self._tables = StepTables(list(terms.spec.sites()), max_rows, max_adapters, device)
        self._expert_T1 = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)  # of a dense site
        self._failed = torch.zeros(terms.layout.pp, dtype=torch.int64, device=device)  # in leader mode: see client.cuh
        self._is_led = terms.coordination == "leader"
        for shard, link in enumerate(links if self._is_led else ()):
            link.be_led(self._tables.live, self._failed[terms.layout.stage(shard) :])
        self._sites: dict[tuple[Any, ...], CapturedSite] = {}
        self._rehearsing = self._with_adapters = False
        self._budget()
        self._watchdog = Watchdog(self._look)

    # -- once per forward pass

    @override
    def begin(self, req_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int]) -> None:
        super().begin(req_ids, counts, computed)
        if self.batch is not None:
            try:
                self._adopt()
                self._tables.write(self.batch)
            except LoraServerError as error:
                self.failed(error, None)
        if self.batch is None:
            self._tables.write(None)
        else:
            self._watchdog.wake()

    @override
    def end(self) -> dict[str, Any]:
        if self.batch is not None:
            self._gpu.settle()
            self._watchdog.sleep()
            self._judge()
        return super().end()

    @contextlib.contextmanager
    @override
    def rehearse(self, with_adapters: bool) -> Iterator[None]:
        self._tables.write(None)
        self._rehearsing, self._with_adapters = True, with_adapters
        try:
            yield
        finally:
            self._rehearsing = False

    @property
    @override
    def active(self) -> bool:
        return self._rehearsing or super().active

    def sent(self) -> list[int]:
        """How many steps kernels have put to each shard since it was joined."""
        return [captured.pushed() for captured in self._captured]

    @override
    def close(self) -> None:
        self._watchdog.close()
        super().close()

    # -- at a site

    @override
    def start_dense(self, site: Site, x_TK: torch.Tensor, window: Window | None = None) -> Launched | None:
        owners: list[tuple[int, range | None]] = [(self._terms.placement.owner(site), None)]
        return self._start(site, self._expert_T1[: len(x_TK)], x_TK, None, window, owners)

    @override
    def start_experts(
        self,
        site: Site,
        experts_Tk: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor | None = None,
        window: Window | None = None,
    ) -> Launched | None:
        placement = self._terms.placement
        owners = [(one, placement.experts(site, one)) for one in placement.layout.stage_shards(site.layer)]
        owners = [(shard, own) for shard, own in owners if len(own)]
        weights_Tk = None if weights is None else weights.view(experts_Tk.shape)
        return self._start(site, experts_Tk.int().contiguous(), x, weights_Tk, window, owners)

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
        owners: Sequence[tuple[int, range | None]],
    ) -> Launched | None:
        if not (self._rehearsing or self.acts_at(site)):
            return None
        window = window or Window(0, ((0, self._terms.spec.out_width(site)),))
        (rows, top_k), by_entry = experts_Tk.shape, weights_Tk is not None
        x, per_row = x if x.stride(1) == 1 else x.contiguous(), top_k if by_entry else 1
        owners = [*owners, *self._others(site, owners)]
        captured = [(self._site(site, shard, x, by_entry, window), among) for shard, among in owners]
        if self._rehearsing and not self._with_adapters:
            return None  # what a later capture needs is there
        adapters_T, directory = self._tables.adapters_T, self._tables.directory(site)
        num_experts, size = self._terms.spec.experts if owners[0][1] is not None else 1, max(1, self._pairs // top_k)
        chunks = []
        for first in range(0, rows, size):
            part = slice(first, min(first + size, rows))
            x_part, weights = x[first * per_row : part.stop * per_row], None if weights_Tk is None else weights_Tk[part]
            on = [
                (its.of(x_part), Choice(experts_Tk[part], weights, adapters_T[part], directory, num_experts, among))
                for its, among in captured
            ]
            chunks.append(Chunk(first, part.stop - first, on))
        chunks[0].put()
        return Launched(chunks, top_k)

    def _others(self, site: Site, owners: Sequence[tuple[int, range | None]]) -> list[tuple[int, range]]:
        """Leader mode: the other shards of the stage, which get a header."""
        stage = self._terms.layout.stage_shards(site.layer) if self._is_led else range(0)
        return [(shard, NOTHING) for shard in stage if shard not in dict(owners)]

    def _site(self, site: Site, shard: int, x: torch.Tensor, by_entry: bool, window: Window) -> CapturedSite:
        """Made at the first pass, which is a rehearsal wherever graphs are captured; graphs keep its address."""
        key = (site, shard, x.shape[1], by_entry, window)
        if key not in self._sites:
            header = header_of(site, code_of(self._terms, self._dtype), x.shape[1], by_entry, window)
            self._sites[key] = self._captured[shard].site(header, x, self._routes[shard], by_entry)
        return self._sites[key]

    # -- the links

    def _budget(self) -> None:
        for captured in self._captured:
            captured.begin(self.client.timeout_seconds)

    def _look(self) -> None:
        for captured in self._captured:
            captured.link.look()

    def _adopt(self) -> None:
        """What was captured goes on with the links of a session that was joined anew; raises ConfigError."""
        if self.client.session is self._session:
            return
        terms = self.client.terms
        is_led = terms.coordination == "leader"
        less_room = terms.max_step_rows < self._terms.max_step_rows
        if (terms.layout, is_led) != (self._terms.layout, self._is_led) or less_room:
            error = ConfigError(
                f"the server came back as {_setting(terms)}, this engine's launches are for {_setting(self._terms)}: "
                "restart the engine"
            )
            self.client.give_up(error)
            raise error
        for captured, link in zip(self._captured, _kernel_links(self.client), strict=True):
            captured.take_over(link)
        self._budget()
        self._tables.forget()
        self._terms, self._session = terms, self.client.session

    def _judge(self) -> None:
        """What became of the pass, which is done."""
        wrong: list[tuple[Captured, LoraServerError]] = []
        for captured in self._captured:
            try:
                captured.finish()
            except LoraServerError as error:
                wrong.append((captured, error))
                if captured.broken is not None:
                    self.client.give_up(error)
        if not wrong:
            return
        self._forgive()
        captured, worst = min(wrong, key=lambda one: isinstance(one[1], AdapterError))
        self.failed(worst, None)
        if isinstance(worst, AdapterError):
            last = captured.last()
            site = Site(last.layer, PROJECTIONS[last.projection])
            self._spare_the_innocent(site, lambda handle: self._probe(captured, last, handle))

    def _forgive(self) -> None:
        """Steps are sent again."""
        self._gpu.write(self._failed.data_ptr(), bytes(self._failed.nbytes))

    def _probe(self, captured: Captured, like: RequestHeader, handle: int) -> None:
        """One row of zeros through one adapter, as in another step on that link; raises the adapter's error."""
        device, site = captured.link.device, Site(like.layer, PROJECTIONS[like.projection])
        shard = self._captured.index(captured)
        among = self._terms.placement.experts(site, shard)
        by_entry = bool(like.flags & slot.HAS_OUT_MAP)
        x = torch.zeros(1, like.in_end - like.in_begin, dtype=self._dtype, device=device)
        header = header_of(
            site, code_of(self._terms, self._dtype), x.shape[1], by_entry, Window(like.in_begin, like.windows)
        )
        expert = torch.full((1, 1), among[0], dtype=torch.int32, device=device)
        adapter = torch.zeros(1, dtype=torch.int32, device=device)
        directory = torch.tensor([[handle, 0, 1]], dtype=torch.int32, device=device)
        weights = torch.ones(1, 1, device=device) if by_entry else None
        probes = []
        for one, own in ((shard, None), *self._others(site, [(shard, None)])):
            probes.append(self._captured[one].site(header, x, Route.empty(1, device, max_rows=1), by_entry))
            probes[-1].put(Choice(expert, weights, adapter, directory, among[0] + 1, own))
        for probe in probes:
            probe.wait()
            probe.link.queue.lead_engine()
        self._gpu.settle()
        self._forgive()
        captured.finish()


def check_launches(terms: Terms, dtype: torch.dtype, max_adapters: int) -> None:
    """What needs no links. Raises ConfigError for what launches cannot do."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"transports gpu and nvshmem: got {dtype} activations, expected bfloat16 or float16; use auto"
        )
    if max_adapters * terms.spec.experts >= MAX_KEYS:
        raise ConfigError(
            f"transports gpu and nvshmem: got steps of up to {max_adapters} requests and {terms.spec.experts} experts, "
            f"expected fewer than {MAX_KEYS} together; give the engine fewer requests at once, or use auto"
        )


def _setting(terms: Terms) -> str:
    return f"{terms.layout} with --max-step-rows {terms.max_step_rows} and --coordination {terms.coordination}"


def _kernel_links(client: Client) -> list[KernelLink]:
    links = [link for link in client.session.links if isinstance(link, KernelLink)]
    if len(links) < len(client.session.links) or not links:
        raise ConfigError(
            "transports gpu and nvshmem: got links that no kernel waits for; start the server with --gpu-transport gpu "
            "or nvshmem, and attach with the same"
        )
    return links
