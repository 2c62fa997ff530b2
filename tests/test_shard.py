"""A real Shard over inproc links: what unknown, late and failing steps do, and to whom."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from test_store import Done, Gate, source_of, spec_of

from kernels_cuda import cpu
from lora_server.errors import (
    AdapterError,
    AdapterFormatError,
    ProtocolError,
    ShardUnavailableError,
    StepTimeoutError,
    UnknownAdapterError,
    rebuild,
)
from lora_server.memory.resident import ResidentStore
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

pytestmark = pytest.mark.usefixtures("quiet")
SECONDS, MAX_ROWS, DEPTH = 20.0, 16, 3
LOADED, ABSENT = 7, 8
LAYER0 = Site(0, "gate_up")


class Client:
    """A client that fills slots by hand. `send` answers with (header, rows); raises what the shard answered."""

    def __init__(self, shard, client, epoch=1):
        shard.port.grant(Grant(client, epoch, b""))
        self.link = InprocLink(shard.port, Hello(client, epoch, b""), shard.index, shard.serve_once)
        self.client, self.epoch, self.seq = client, epoch, 0

    def request(self, site=LAYER0, handle=LOADED, rows=2, budget=SECONDS, maps=True, **fields):
        """A valid request at the next seq, as bytes; `fields` overwrite its header."""
        spec, seq = spec_of("mixtral"), self.seq + 1
        flags = slot.HAS_IN_MAP | slot.HAS_OUT_MAP if maps else 0
        width, entries = spec.in_width(site), 2 * rows if maps else rows
        segments = [(handle, 1, 0, rows), (handle, 2, rows, rows)] if maps else [(handle, 1, 0, rows)]
        at = slot.request_offsets(len(segments), entries, flags, rows * width * 4)
        memory = bytearray(at.end)
        header = {
            "step_class": slot.DECODE,
            "flags": flags,
            "client": self.client,
            "epoch": self.epoch,
            "seq": seq,
            "slot": seq % DEPTH,
            "layer": site.layer,
            "projection": PROJECTIONS.index(site.projection),
            "dtype": 0,
            "num_rows": rows,
            "num_entries": entries,
            "num_segments": len(segments),
            "num_out_rows": rows,
            "in_begin": 0,
            "in_end": width,
            "windows": ((0, spec.out_width(site)),),
            "payload_bytes": at.end - slot.HEADER_BYTES,
            "budget_us": round(budget * 1e6),
            "pushed_ns": 0,
        } | fields
        RequestHeader(**header).pack_into(memoryview(memory))
        struct.pack_into(f"<{4 * len(segments)}I", memory, at.segments, *[n for s in segments for n in s])
        if maps:
            rows_of_entries = [*range(rows), *range(rows)]
            struct.pack_into(f"<{entries}I", memory, at.in_map, *rows_of_entries)
            struct.pack_into(f"<{entries}I", memory, at.out_map, *rows_of_entries)
            struct.pack_into(f"<{entries}f", memory, at.weights, *[0.5] * entries)
        struct.pack_into(f"<{rows * width}f", memory, at.rows, *[1.0] * rows * width)
        return memory

    def push(self, memory):
        self.seq += 1
        self.link.region.request(self.seq)[: len(memory)] = memory
        self.link.push(self.seq, len(memory))
        return self.seq

    def answer(self, seq, seconds=SECONDS):
        self.link.wait(seq, time.monotonic() + seconds)
        memory = self.link.region.response(seq)
        header = ResponseHeader.unpack_from(memory)
        assert (header.client, header.epoch, header.seq) == (self.client, self.epoch, seq)
        payload = memory[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes]
        if header.status != slot.OK:
            code, _, message = bytes(payload).decode().partition("\n")
            raise rebuild(code, message)
        assert len(payload) == header.num_rows * header.width * slot.ELEMENT_BYTES[header.dtype]
        return header, bytes(payload)

    def send(self, memory, seconds=SECONDS):
        return self.answer(self.push(memory), seconds)


@dataclass
class Rig:
    shard: Shard
    gate: Gate

    def load(self, handle, path):
        done = Done()
        self.shard.store.load(handle, source_of(path), done)
        return done


def make_rig(layout="ep1-pp1", index=0):
    spec, gate = spec_of("mixtral"), Gate()
    store = ResidentStore(Placement(spec, Layout.parse(layout)), index, torch.float32, gate)
    port = Port(RegionLayout.for_model(spec, MAX_ROWS, DEPTH))
    return Rig(Shard(index, spec, MAX_ROWS, port, store, Independent(), HostCompute(cpu.lora_step)), gate)


@contextlib.contextmanager
def loaded_rig(path):
    rig = make_rig()
    assert rig.load(LOADED, path).result() is None
    yield rig
    rig.shard.store.close()


@pytest.fixture(scope="module")
def loaded(tiny_adapters):
    with loaded_rig(tiny_adapters["all"]) as rig:
        yield rig


@pytest.fixture
def rig():
    rig = make_rig()
    yield rig
    rig.gate.open()
    rig.shard.store.close()


def healthy(client):
    header, rows = client.send(client.request())
    values = torch.frombuffer(bytearray(rows), dtype=torch.float32)
    assert (
        header.num_rows == 2 and values.abs().sum() > 0 and torch.equal(values[: header.width], values[header.width :])
    )
    return rows


@pytest.mark.parametrize("word", [slot.signal(1, 2**40), slot.signal(1, 2**48 - 1)])
def test_wild_signals_cut_a_client_off_and_delay_nobody(loaded, word):
    """A client that signals beyond its slots breaks the contract; the others do not notice."""
    wild, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    wild.push(wild.request())
    wild.link.region.request_signal[0] = word
    for _ in range(5):
        healthy(good)
    assert [connection.client for connection in loaded.shard.port.connections] == [2]
    wild.link.close(), good.link.close()


def test_windows_and_dtypes(loaded):
    client = Client(loaded.shard, 1)
    _, whole = client.send(client.request())
    whole = torch.frombuffer(bytearray(whole), dtype=torch.float32).view(2, -1)
    header, part = client.send(client.request(windows=((10, 30), (100, 101))))
    part = torch.frombuffer(bytearray(part), dtype=torch.float32).view(2, -1)
    assert header.width == 21
    torch.testing.assert_close(part, torch.cat([whole[:, 10:30], whole[:, 100:101]], 1))
    header, _ = client.send(client.request(maps=False))
    assert header.num_rows == 2 and header.width == 192
    client.link.close()


def test_an_unknown_handle_is_named(loaded):
    client, counters = Client(loaded.shard, 1), loaded.shard.counters
    failed, steps = counters.failed, counters.steps
    with pytest.raises(UnknownAdapterError, match=rf"shard 0 client 1 slot 1 seq 1 .*handle {ABSENT}"):
        client.send(client.request(handle=ABSENT))
    healthy(client)
    assert (counters.failed, counters.steps) == (failed + 1, steps + 1)
    client.link.close()


@pytest.mark.parametrize("site", [LAYER0, Site(1, "gate_up"), Site(0, "qkv")])
def test_a_step_at_the_wrong_shard_is_refused_and_not_answered_with_zeros(site, tiny_adapters):
    owner, *others = (make_rig("ep2-pp2", index) for index in range(4))
    if site.layer:
        owner, *others = others[1], owner, others[0], others[2]
    for rig in (owner, *others):
        assert rig.load(LOADED, tiny_adapters["all"]).result() is None
    for rig in (owner, *others):
        client = Client(rig.shard, 1)
        memory = client.request(site, maps=False, rows=1)
        if site.projection == "qkv":
            struct.pack_into("<I", memory, slot.HEADER_BYTES + 4, 0)
        if rig is owner:
            client.send(memory)
        else:
            with pytest.raises(ProtocolError, match="placements differ"):
                client.send(memory)
        rig.shard.store.close()


def test_a_step_waits_for_its_layer_while_others_are_served(rig, tiny_adapters):
    assert rig.load(LOADED, tiny_adapters["all"]).result() is None
    rig.gate.shut(), rig.gate.arrived.clear()
    rig.load(ABSENT, tiny_adapters["all"])
    assert rig.gate.arrived.wait(SECONDS), "layer 0 is here, layer 1 is not"
    early, waits, other = (Client(rig.shard, client) for client in (1, 2, 3))
    early.send(early.request(handle=ABSENT))
    seq = waits.push(waits.request(Site(1, "gate_up"), handle=ABSENT))
    for _ in range(10):
        healthy(other)
    assert waits.link.responded() == 0
    rig.gate.open()
    waits.answer(seq)
    assert waits.send(waits.request(handle=ABSENT))[1] == early.send(early.request(handle=ABSENT))[1]


def test_a_waiting_step_prefetches_its_adapter(rig, tiny_adapters):
    rig.gate.shut()
    rig.load(1, tiny_adapters["all"])
    assert rig.gate.arrived.wait(SECONDS)
    for handle in (2, 3, 4):
        rig.load(handle, tiny_adapters["down"])
    client = Client(rig.shard, 1)
    seq = client.push(client.request(Site(3, "down"), handle=4, maps=False))
    assert rig.shard.serve_once() is False
    rig.gate.open()
    client.answer(seq)
    assert [loaded for loaded in rig.gate.loaded if loaded[0] != 1][:4] == [(4, layers) for layers in (1, 2, 3, 4)]


@pytest.mark.parametrize("ends", ["timeout", "drop", "failure", "leaves", "revoked"])
def test_how_a_wait_for_weights_ends(ends, rig, tiny_adapters, tmp_path):
    rig.gate.shut()
    path = tiny_adapters["all"]
    if ends == "failure":
        (tmp_path / "adapter_config.json").write_text("{}")
        rig.load(LOADED, tiny_adapters["down"])
        assert rig.gate.arrived.wait(SECONDS)
        path = tmp_path
    rig.load(ABSENT, path)
    assert rig.gate.arrived.wait(SECONDS)
    client = Client(rig.shard, 1)
    budget = 0.05 if ends == "timeout" else SECONDS
    seq, began = (
        client.push(client.request(Site(3, "down"), handle=ABSENT, maps=False, budget=budget)),
        time.monotonic(),
    )
    assert rig.shard.serve_once() is False
    if ends == "timeout":
        with pytest.raises(StepTimeoutError, match=rf"shard 0 client 1 .*handle {ABSENT} .*deadline"):
            client.answer(seq)
        assert 0.05 <= time.monotonic() - began < 5
    elif ends == "drop":
        rig.shard.store.drop(ABSENT)
        with pytest.raises(UnknownAdapterError, match=f"handle {ABSENT}"):
            client.answer(seq)
    elif ends == "failure":
        rig.gate.open()
        with pytest.raises(AdapterError) as caught:
            client.answer(seq)
        assert isinstance(caught.value, AdapterFormatError) and str(tmp_path) in str(caught.value)
    else:
        client.link.close() if ends == "leaves" else rig.shard.port.revoke(1)
        assert rig.shard.serve_once() is False and not rig.shard._pending
        if ends == "revoked":
            with pytest.raises(ShardUnavailableError):
                client.answer(seq)


def test_the_loop_stops_and_wakes(loaded, tiny_adapters):
    """`run` in a thread: it is woken by the doorbell and ends when it is told to."""
    stop, client = threading.Event(), Client(loaded.shard, 5)
    client.link._pump = lambda: time.sleep(1e-4)
    thread = threading.Thread(target=loaded.shard.run, args=(stop.is_set,))
    thread.start()
    for _ in range(20):
        seq = client.push(client.request())
        loaded.shard.port.ring()
        client.answer(seq)
    client.link.close()
    stop.set(), loaded.shard.port.ring()
    thread.join(SECONDS)
    assert not thread.is_alive()
