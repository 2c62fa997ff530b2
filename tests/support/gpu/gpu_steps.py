"""Steps of one adapter at one site, by hand, over any link of a session."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from bench.gpu_run.local_shard import LocalShard
from client_connector.packing import code_of
from client_connector.session import Session
from lora_server.placement import Layout, Placement
from lora_server.spec import PROJECTIONS, Site
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader, Wire
from tests.support.gpu.emulated_gpu import EmulatedGpu
from tests.support.workload import spec_of

ROWS = 3
SITE = Site(0, "qkv")
SECONDS = 60.0
IN_MAP = slot.HAS_IN_MAP


class Steps:
    """Steps of one client; `x` are the rows of each."""

    def __init__(self, session: Session, handle: int, shard: int = 0, site: Site = SITE) -> None:
        self.link, self.terms, self.handle, self.seq = session.links[shard], session.terms, handle, 0
        self.site, spec, self.dtype = site, session.terms.spec, code_of(session.terms, torch.bfloat16)
        self.windows = ((0, spec.out_width(site)),)
        self.x = torch.randn(ROWS, spec.in_width(site), generator=torch.Generator().manual_seed(1)).bfloat16()

    def header(self, seq: int, payload_bytes: int, seconds: float = SECONDS) -> RequestHeader:
        client, epoch = self.terms.client, self.terms.epoch
        projection = PROJECTIONS.index(self.site.projection)
        where = (seq % self.link.region.layout.depth, self.site.layer, projection, self.dtype)
        counts = (ROWS, ROWS, 1, ROWS, 0, self.x.shape[1])
        return RequestHeader(
            0, 0, client, epoch, seq, *where, *counts, self.windows, payload_bytes, int(seconds * 1e6), 0
        )

    def push(self, seconds: float = SECONDS, combined: int = 0) -> RequestHeader:
        """combined: so many entries, all of the first row and for the first token; else an entry per row."""
        self.seq += 1
        entries, flags = combined or ROWS, (IN_MAP | slot.HAS_OUT_MAP) * bool(combined)
        row_bytes, scales = self.x.shape[1] * slot.ELEMENT_BYTES[self.dtype], slot.num_scales(ROWS, self.dtype)
        at = slot.request_offsets(1, entries, flags, ROWS * row_bytes, scales)
        header, memory = self.header(self.seq, at.end - slot.HEADER_BYTES, seconds), self.link.region.request(self.seq)
        header = header._replace(flags=flags | slot.WAITS_FOR_WEIGHTS, num_entries=entries)
        header.pack_into(memory)
        np.frombuffer(memory, np.int32, 4, at.segments)[:] = [self.handle, 0, 0, entries]
        if combined:
            memory[at.in_map : at.weights] = bytes(at.weights - at.in_map)
            np.frombuffer(memory, np.float32, entries, at.weights)[:] = 1
        self.link.put_rows(header, self.x, torch.arange(ROWS))
        self.link.push(self.seq, at.end)
        return header

    def step(self, seconds: float = SECONDS) -> torch.Tensor | str:
        """Push a step and wait; return its rows, or the code of the error that answered it."""
        return self.answer(self.push(seconds))

    def answer(self, sent: RequestHeader) -> torch.Tensor | str:
        """Wait for the answer to a pushed step; return its rows, or an error's code."""
        self.link.wait(sent.seq, time.monotonic() + SECONDS)
        memory = self.link.region.response(sent.seq)
        header = ResponseHeader.unpack_from(memory)
        assert (header.client, header.epoch, header.seq) == (sent.client, sent.epoch, sent.seq)
        if header.status == slot.OK:
            return self.link.rows.deltas(sent, self.x).clone()
        text = bytes(memory[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes]).decode()
        return text.partition("\n")[0]


class Host(LocalShard):
    """A shard of the tiny Mixtral; serves until `close`."""

    def __init__(
        self, directory: Path, *, idle_ns=1_000_000_000, pages=4, wire: Wire = "exact", gpu=None, rows=16
    ) -> None:
        placement = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1"))
        super().__init__(directory, gpu or EmulatedGpu(), placement, rows=rows, pages=pages, wire=wire, idle_ns=idle_ns)

    def join(self, handle: int) -> Steps:
        link = self.connect([handle])
        terms = SimpleNamespace(client=self.clients, epoch=1, spec=self.spec, wire=self.wire)
        return Steps(SimpleNamespace(links=[link], terms=terms), handle)

    def aim(self, steps: Steps, handle: int) -> None:
        self.port.hold(steps.terms.client, [handle])
        steps.handle = handle

    def peers(self) -> list:
        return [key.data for key in self.listener._selector.get_map().values() if hasattr(key.data, "mirror")]
