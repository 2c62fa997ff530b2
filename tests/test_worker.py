"""A real Shard over inproc links: what malformed, unknown, late and failing steps do, and to whom."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import Done, Gate, adapters, spec_of  # noqa: F401  (a fixture)
from test_wire import field_at

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
from lora_server.memory.store import ResidentStore
from lora_server.placement import Layout, Placement
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.base import Grant, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader, ResponseHeader
from lora_server.worker.coordination import Independent
from lora_server.worker.shard import Shard

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

    def send(self, memory):
        return self.answer(self.push(memory))


@dataclass
class Rig:
    shard: Shard
    gate: Gate

    def load(self, handle, path):
        done = Done()
        self.shard.store.load(handle, path, done)
        return done


def make_rig(layout="ep1-pp1", index=0):
    spec, gate = spec_of("mixtral"), Gate()
    store = ResidentStore(Placement(spec, Layout.parse(layout)), index, torch.float32, gate)
    port = Port(RegionLayout.for_model(spec, MAX_ROWS, DEPTH))
    return Rig(Shard(index, spec, MAX_ROWS, port, store, Independent(), cpu.lora_step), gate)


@pytest.fixture(scope="module")
def loaded(adapters):  # noqa: F811
    rig = make_rig()
    assert rig.load(LOADED, adapters["all"]).result() is None
    yield rig
    rig.shard.store.close()


@pytest.fixture
def rig():
    rig = make_rig()
    yield rig
    rig.gate.open()
    rig.shard.store.close()


def healthy(client):
    header, rows = client.send(client.request())
    values = torch.frombuffer(bytearray(rows), dtype=torch.float32)
    assert header.num_rows == 2 and values.abs().sum() > 0 and torch.equal(values[: header.width], values[header.width :])
    return rows


HUGE = (2**31, 2**32 - 1)
BAD_FIELDS = [
    *({"step_class": value} for value in (2, 255)),
    *({"client": value} for value in (0, 2**32 - 1)),
    *({"epoch": value} for value in (0, 2)),
    *({"seq": value} for value in (0, 2, 2**64 - 1)),
    *({"layer": value} for value in (4, *HUGE)),
    *({"projection": value} for value in (4, *HUGE)),
    *({"dtype": value} for value in (1, 3, *HUGE)),
    *({"flags": value} for value in (0, 1, 2)),
    *({"num_rows": value} for value in (0, 1, 3, MAX_ROWS + 1, *HUGE)),
    *({"num_entries": value} for value in (0, 1, 5, MAX_ROWS + 1, *HUGE)),
    *({"num_segments": value} for value in (0, 1, 3, 1000, *HUGE)),
    *({"num_out_rows": value} for value in (0, 1, MAX_ROWS + 1, *HUGE)),
    *({"in_begin": value} for value in (1, 64, *HUGE)),
    *({"in_end": value} for value in (0, 63, 65, *HUGE)),
    *({"windows": value} for value in (((0, 193),), ((5, 5),), ((5, 4),), ((0, 192), (0, 192)), ((9, 12), (0, 3)))),
    *({"windows": ((0, 192),) * 3, "num_out_rows": MAX_ROWS} for _ in range(1)),
    *({"payload_bytes": value} for value in (0, 1, 2**64 - 1)),
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_a_malformed_header_is_answered_with_a_typed_error(fields, loaded):
    bad, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    with pytest.raises(ProtocolError, match=r"client|window"):
        bad.send(bad.request(**fields))
    healthy(good), healthy(bad)
    bad.link.close(), good.link.close()


TABLES = {  # (part, index of a word, value)
    "unsorted segments": ("segments", 2, 1),
    "a gap": ("segments", 6, 3),
    "an empty segment": ("segments", 3, 0),
    "too many entries": ("segments", 7, 2**31),
    "an expert too many": ("segments", 1, 8),
    "a huge expert": ("segments", 1, 2**32 - 1),
    "a huge handle": ("segments", 0, 2**32 - 1),
    "in_map": ("in_map", 3, 2),
    "negative in_map": ("in_map", 0, 2**32 - 1),
    "out_map": ("out_map", 3, 2),
    "negative out_map": ("out_map", 0, 2**31),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_malformed_table_is_answered_with_a_typed_error(case, loaded):
    bad, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    part, index, value = TABLES[case]
    memory = bad.request()
    offset = getattr(slot.request_offsets(2, 4, 3, 0), part)
    struct.pack_into("<I", memory, offset + 4 * index, value)
    with pytest.raises(ProtocolError, match="client 1 slot 1 seq 1"):
        bad.send(memory)
    healthy(good), healthy(bad)
    bad.link.close(), good.link.close()


BITS = st.lists(st.integers(0, (slot.request_offsets(2, 4, 3, 0).rows + 8) * 8 - 1), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(bits=BITS, word=st.one_of(st.none(), st.tuples(st.integers(0, 60), st.integers(0, 2**32 - 1))))
def test_flipped_bits_never_kill_the_loop_or_touch_another_client(loaded, bits, word):
    fuzzer, other = Client(loaded.shard, 1), Client(loaded.shard, 2)
    expected = healthy(other)
    memory = fuzzer.request()
    for bit in bits:
        memory[bit // 8] ^= 1 << bit % 8
    if word is not None:
        struct.pack_into("<I", memory, 4 * word[0], word[1])
    # a flipped budget or seq is no wait: LOADED is READY and every other handle unknown
    try:
        fuzzer.send(memory)
    except (ProtocolError, UnknownAdapterError):
        pass
    assert healthy(other) == expected
    assert healthy(fuzzer) == expected
    fuzzer.link.close(), other.link.close()


def test_wild_signals_are_answered_one_by_one_and_delay_nobody(loaded):
    """A client that signals far ahead gets errors for what it did not fill; each round serves the others."""
    wild, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    wild.push(wild.request())
    wild.link.region.request_signal[0] = slot.signal(1, 2**40)
    for _ in range(5):
        healthy(good)
    (connection,) = (c for c in loaded.shard.port.connections if c.client == 1)
    assert connection.served <= 50
    wild.link.region.request_signal[0] = 2**64 - 1
    healthy(good)
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
def test_a_step_at_the_wrong_shard_is_refused_and_not_answered_with_zeros(site, adapters):  # noqa: F811
    owner, *others = (make_rig("ep2-pp2", index) for index in range(4))
    if site.layer:
        owner, *others = others[1], owner, others[0], others[2]
    for rig in (owner, *others):
        assert rig.load(LOADED, adapters["all"]).result() is None
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


def test_a_step_waits_for_its_layer_while_others_are_served(rig, adapters):  # noqa: F811
    assert rig.load(LOADED, adapters["all"]).result() is None
    rig.gate.shut(), rig.gate.arrived.clear()
    rig.load(ABSENT, adapters["all"])
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


def test_a_waiting_step_prefetches_its_adapter(rig, adapters):  # noqa: F811
    rig.gate.shut()
    rig.load(1, adapters["all"])
    assert rig.gate.arrived.wait(SECONDS)
    for handle in (2, 3, 4):
        rig.load(handle, adapters["down"])
    client = Client(rig.shard, 1)
    seq = client.push(client.request(Site(3, "down"), handle=4, maps=False))
    assert rig.shard.serve_once() is False
    rig.gate.open()
    client.answer(seq)
    assert [loaded for loaded in rig.gate.loaded if loaded[0] != 1][:4] == [(4, layers) for layers in (1, 2, 3, 4)]


@pytest.mark.parametrize("ends", ["timeout", "drop", "failure", "leaves", "revoked"])
def test_how_a_wait_for_weights_ends(ends, rig, adapters, tmp_path):  # noqa: F811
    rig.gate.shut()
    path = adapters["all"]
    if ends == "failure":
        (tmp_path / "adapter_config.json").write_text("{}")
        rig.load(LOADED, adapters["down"])
        assert rig.gate.arrived.wait(SECONDS)
        path = tmp_path
    rig.load(ABSENT, path)
    assert rig.gate.arrived.wait(SECONDS)
    client = Client(rig.shard, 1)
    budget = 0.05 if ends == "timeout" else SECONDS
    seq, began = client.push(client.request(Site(3, "down"), handle=ABSENT, maps=False, budget=budget)), time.monotonic()
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


def test_the_loop_stops_and_wakes(loaded, adapters):  # noqa: F811
    """`run` in a thread: it is woken by the doorbell and ends when it is told to."""
    stop, client = threading.Event(), Client(loaded.shard, 5)
    client.link._pump = lambda: False
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


def test_fields_of_the_fuzzed_header_are_where_they_are():
    assert field_at(slot.REQUEST_FIELDS, "pushed_ns")[0] < slot.HEADER_BYTES
