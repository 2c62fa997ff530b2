"""The links of a session as an engine's kernels use them: joined again, budgeted, watched, and judged by the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client_connector.client import Client
from client_connector.packing import Window, code_of
from client_connector.serving.launches import NOTHING, header_of
from kernels_cuda.routing import MAX_PAIRS, Choice, Route
from lora_server.device.client.captured import Captured
from lora_server.device.client.link import KernelLink
from lora_server.errors import ConfigError, LoraServerError
from lora_server.spec import PROJECTIONS, Site
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader
from lora_server.wire.terms import Terms


class KernelLinks:
    """A captured link to each shard. Graphs keep their addresses, so a rejoined session must take the links over."""

    def __init__(self, client: Client, live: torch.Tensor, max_rows: int, halves: int = 1) -> None:
        """Capture the links of a client's session. `live`: int32 [1], whether the pass has a row with an adapter;
        max_rows: rows of an engine's step; halves: how often each of them is sent.

        Raises ConfigError.
        """
        links = kernel_links(client)
        self._client, self._session, self.terms = client, client.session, client.terms
        self.gpu, self.device = links[0].gpu, links[0].device
        top_k = self.terms.spec.top_k
        self._most_pairs = min(max_rows * top_k, MAX_PAIRS)  # a message never has more
        self.pairs = min(self.terms.max_step_rows, self._most_pairs)  # in one message
        self.captured = [Captured(link) for link in links]
        chunks = halves * -(-max_rows // (self.pairs // top_k))
        self.depth = min(_depth_of(links), chunks)  # those sent at the same time
        # in leader mode: the pass failed on a stage, see client.cuh
        self._failed = torch.zeros(self.terms.layout.pp, dtype=torch.int64, device=self.device)
        for shard, link in enumerate(links if self.is_led else ()):
            link.state.be_led(live, self._failed[self.terms.layout.stage(shard) :])
        self.set_budget()

    @property
    def is_led(self) -> bool:
        """Whether the server runs in leader mode."""
        return self.terms.coordination == "leader"

    def set_budget(self) -> None:
        """Tell the kernels how long each of their waits may take."""
        for captured in self.captured:
            captured.begin(self._client.timeout_seconds)

    def look(self) -> None:
        """Look whether shards are alive, while kernels may wait for them."""
        for captured in self.captured:
            captured.link.answers.look()

    def sent(self) -> list[int]:
        """Count the steps that kernels have put to each shard since it was joined."""
        return [captured.pushed() for captured in self.captured]

    def adopt(self) -> bool:
        """Go on with the links of a session that was joined again; return whether there is one. Raises ConfigError."""
        if self._client.session is self._session:
            return False
        terms, links = self._client.terms, kernel_links(self._client)
        depth = _depth_of(links)
        is_smaller = min(terms.max_step_rows, self._most_pairs) < self.pairs or depth < self.depth
        if (terms.layout, terms.coordination == "leader") != (self.terms.layout, self.is_led) or is_smaller:
            error = ConfigError(
                f"the server came back as {_setting(terms, depth)}, this engine's launches are for "
                f"{_setting(self.terms, self.depth)}: restart the engine"
            )
            self._client.give_up(error)
            raise error
        for captured, link in zip(self.captured, links, strict=True):
            captured.take_over(link)
        self.set_budget()
        self.terms, self._session = terms, self._client.session
        return True

    def errors(self) -> list[tuple[Captured, LoraServerError]]:
        """Return the errors of a pass that has ended, with their links; the next pass sends again."""
        wrong: list[tuple[Captured, LoraServerError]] = []
        for captured in self.captured:
            try:
                captured.finish()
            except LoraServerError as error:
                wrong.append((captured, error))
                if captured.broken is not None:
                    self._client.give_up(error)
        if wrong:
            self._forgive()
        return wrong

    def _forgive(self) -> None:
        self.gpu.write(self._failed.data_ptr(), bytes(self._failed.nbytes))

    def others(self, site: Site, owners: Sequence[tuple[int, range | None]]) -> list[tuple[int, range]]:
        """List the other shards of the stage, which get a header in leader mode."""
        stage = self.terms.layout.stage_shards(site.layer) if self.is_led else range(0)
        return [(shard, NOTHING) for shard in stage if shard not in dict(owners)]

    def probe(self, captured: Captured, like: RequestHeader, dtype: torch.dtype, handle: int) -> None:
        """Send a row of zeros through one adapter, as in another step on that link; raises the adapter's error."""
        site = Site(like.layer, PROJECTIONS[like.projection])
        shard = self.captured.index(captured)
        among = self.terms.placement.experts(site, shard)
        by_entry = bool(like.flags & slot.HAS_OUT_MAP)
        x = torch.zeros(1, like.in_end - like.in_begin, dtype=dtype, device=self.device)
        window = Window(like.in_begin, like.windows)
        header = header_of(site, code_of(self.terms, dtype), x.shape[1], by_entry, window)
        expert = torch.full((1, 1), among[0], dtype=torch.int32, device=self.device)
        adapter = torch.zeros(1, dtype=torch.int32, device=self.device)
        directory = torch.tensor([[handle, 0, 1]], dtype=torch.int32, device=self.device)
        weights = torch.ones(1, 1, device=self.device) if by_entry else None
        probes = []
        for one, own in ((shard, None), *self.others(site, [(shard, None)])):
            probes.append(self.captured[one].site(header, x, Route.empty(1, self.device, max_rows=1), by_entry))
            probes[-1].put(Choice(expert, weights, adapter, directory, among[0] + 1, own))
        for probe in probes:
            probe.wait()
            probe.link.queue.lead_engine()
        self.gpu.settle()
        self._forgive()
        captured.finish()


def _depth_of(links: Sequence[KernelLink]) -> int:
    return min(link.memory.sizes.depth for link in links)


def _setting(terms: Terms, depth: int) -> str:
    flags = f"--max-step-rows {terms.max_step_rows}, --slots {depth} and --coordination {terms.coordination}"
    return f"{terms.layout} with {flags}"


def kernel_links(client: Client) -> list[KernelLink]:
    """Return the session's links; raises ConfigError unless kernels wait for all of them."""
    links = [link for link in client.session.links if isinstance(link, KernelLink)]
    if len(links) < len(client.session.links) or not links:
        raise ConfigError(
            "transports gpu and nvshmem: got links that no kernel waits for; start the server with --gpu-transport gpu "
            "or nvshmem, and attach with the same"
        )
    return links
