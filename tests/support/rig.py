"""A real Shard over inproc links, and a client that fills its slots by hand."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels_cuda import cpu
from lora_server.errors import rebuild
from lora_server.placement import Layout, Placement
from lora_server.shard.compute import HostCompute
from lora_server.shard.coordination import Independent
from lora_server.shard.loop import Shard
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.base import Grant, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader, ResponseHeader
from tests.support.stores import SECONDS, Done, Gate, cpu_store, load
from tests.support.workload import spec_of

MAX_ROWS, DEPTH = 16, 3
LOADED = 7  # the handle that `loaded_rig` loads and requests name
LAYER0 = Site(0, "gate_up")


class Client:
    """A client that fills slots by hand. `send` answers with (header, rows); raises what the shard answered."""

    def __init__(
        self, shard: Shard, client: int, epoch: int = 1, tenant: str = "", weight: float = 1.0, step_us: int = 0
    ) -> None:
        shard.port.grant(Grant(client, epoch, b"", tenant, weight, step_us=step_us))
        shard.port.hold(client, range(100))
        self.link = InprocLink(shard.port, Hello(client, epoch, b""), shard.index, shard.serve_once)
        self.client, self.epoch, self.seq = client, epoch, 0

    def request(
        self,
        site: Site = LAYER0,
        handle: int = LOADED,
        rows: int = 2,
        budget: float = SECONDS,
        maps: bool = True,
        waits: bool = True,
        **fields: object,
    ) -> bytearray:
        """A valid request at the next seq, as bytes; `fields` overwrite its header."""
        spec, seq = spec_of("mixtral"), self.seq + 1
        flags = (slot.HAS_IN_MAP | slot.HAS_OUT_MAP if maps else 0) | slot.WAITS_FOR_WEIGHTS * waits
        width, entries = spec.in_width(site), 2 * rows if maps else rows
        segments = [(handle, 1, 0, rows), (handle, 2, rows, rows)] if maps else [(handle, 1, 0, rows)]
        at = slot.request_offsets(len(segments), entries, flags, rows * width * 4)
        memory = bytearray(at.end)
        header = RequestHeader(
            step_class=slot.DECODE, flags=flags, client=self.client, epoch=self.epoch, seq=seq, slot=seq % DEPTH,
            layer=site.layer, projection=PROJECTIONS.index(site.projection), dtype=0, num_rows=rows,
            num_entries=entries, num_segments=len(segments), num_out_rows=rows, in_begin=0, in_end=width,
            windows=((0, spec.out_width(site)),), payload_bytes=at.end - slot.HEADER_BYTES,
            budget_us=round(budget * 1e6), pushed_ns=0,
        )  # fmt: skip
        header._replace(**fields).pack_into(memoryview(memory))
        parts = {at.segments: np.array(segments, np.uint32), at.rows: np.ones(rows * width, np.float32)}
        if maps:
            rows_of_entries = np.tile(np.arange(rows, dtype=np.uint32), 2)
            parts |= {at.in_map: rows_of_entries, at.out_map: rows_of_entries}
            parts[at.weights] = np.full(entries, 0.5, np.float32)
        for begin, array in parts.items():
            memory[begin : begin + array.nbytes] = array.tobytes()
        return memory

    def push(self, memory: bytearray) -> int:
        self.seq += 1
        self.link.region.request(self.seq)[: len(memory)] = memory
        self.link.push(self.seq, len(memory))
        return self.seq

    def answer(self, seq: int, seconds: float = SECONDS) -> tuple[ResponseHeader, bytes]:
        self.link.wait(seq, time.monotonic() + seconds)
        memory = self.link.region.response(seq)
        header = ResponseHeader.unpack_from(memory)
        assert (header.client, header.epoch, header.seq) == (self.client, self.epoch, seq)
        payload = memory[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes]
        if header.status != slot.OK:
            code, _, message = bytes(payload).decode().partition("\n")
            raise rebuild(code, message)
        end = slot.response_offsets(header.num_rows, header.width, header.dtype).end
        assert len(payload) == end - slot.HEADER_BYTES
        return header, bytes(payload)

    def send(self, memory: bytearray, seconds: float = SECONDS) -> tuple[ResponseHeader, bytes]:
        return self.answer(self.push(memory), seconds)


@dataclass
class Rig:
    shard: Shard
    gate: Gate

    def load(self, handle: int, path: Path) -> Done:
        return load(self.shard.store, handle, path)


def make_rig(layout: str = "ep1-pp1", index: int = 0, wire: slot.Wire = "exact", **options: float) -> Rig:
    """`options`: of the shard."""
    spec, gate = spec_of("mixtral"), Gate()
    store = cpu_store(Placement(spec, Layout.parse(layout)), index, torch.float32, on_layer=gate)
    port = Port(RegionLayout.for_model(spec, MAX_ROWS, DEPTH, wire))
    compute = HostCompute(cpu.lora_parts)
    return Rig(Shard(index, spec, MAX_ROWS, port, store, Independent(), compute, wire, **options), gate)


@contextlib.contextmanager
def loaded_rig(path: Path, **options: float) -> Iterator[Rig]:
    rig = make_rig(**options)
    assert rig.load(LOADED, path).result() is None
    yield rig
    rig.shard.store.close()


def healthy(client: Client) -> bytes:
    """A step of this client is served; its rows."""
    header, rows = client.send(client.request())
    first, second = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(2, header.width)
    assert first.any() and torch.equal(first, second)
    return rows
