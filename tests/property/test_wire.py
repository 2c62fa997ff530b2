"""The slot and its C mirror, signal words, the region and what is pinned of it, and the control messages."""

import itertools
import re
import socket
import struct
import time
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_server import errors, spec
from lora_server.device.client.cuda_ipc import _used_parts
from lora_server.device.client.link import ANSWER_BYTES
from lora_server.errors import ProtocolError
from lora_server.wire import messages, region, slot
from lora_server.wire.messages import Hello, Order, Refused, Welcome
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout
from lora_server.wire.rpc import open_channel
from lora_server.wire.slot import RequestHeader, ResponseHeader
from tests.support.gpu import emulated_gpu
from tests.support.gpu.gpu_steps import Host
from tests.support.workload import spec_of

HEADER = (Path(slot.__file__).parent / "slot.h").read_text()
SIZES = {"uint8_t": ("B", 1), "uint16_t": ("H", 2), "uint32_t": ("I", 4), "uint64_t": ("Q", 8)}
STRUCTS = {
    "lora_request": slot.REQUEST_FIELDS,
    "lora_response": slot.RESPONSE_FIELDS,
    "lora_segment": slot.SEGMENT_FIELDS,
}
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SEQ = st.integers(1, 2**48 - 1)


def c_struct(name):
    """(name, struct code, count) of each field, as the header declares them."""
    body = re.search(rf"struct {name} \{{(.*?)\}};", HEADER, re.DOTALL)[1]
    found = re.findall(r"(uint\d+_t) (\w+)(?:\[(\d+)\])?;", body)
    assert len(found) == body.count(";")
    return [(field, SIZES[kind][0], int(count or 1)) for kind, field, count in found]


def define(name):
    return int(re.search(rf"#define {name} (0x[0-9A-Fa-f]+|\d+)u?\b", HEADER)[1], 0)


@pytest.mark.parametrize("name", STRUCTS)
def test_c_struct_equals_python_layout(name):
    fields = c_struct(name)
    assert fields == list(STRUCTS[name])
    packed = natural = 0
    for field, code, count in fields:
        size = struct.calcsize(f"<{code}")
        natural = -(-natural // size) * size
        assert natural == packed, f"{name}.{field}: a C compiler would pad before it"
        packed = natural = packed + size * count
    assert packed <= define("LORA_HEADER_BYTES") == slot.HEADER_BYTES
    assert packed % 8 == 0, "a C compiler would pad the end"
    if name == "lora_segment":
        assert packed == slot.SEGMENT_BYTES


def test_c_geometry_and_constants_equal_python():
    codes = "".join(code * count for _, code, count in c_struct("lora_geometry"))
    assert "<" + codes == region.GEOMETRY.format
    assert define("LORA_REGION_MAGIC") == region.MAGIC
    assert define("LORA_PAGE_BYTES") == region.PAGE_BYTES
    assert define("LORA_REQUEST_MAGIC") == slot.REQUEST_MAGIC == int.from_bytes(b"LORQ", "little")
    assert define("LORA_RESPONSE_MAGIC") == slot.RESPONSE_MAGIC == int.from_bytes(b"LORP", "little")
    assert define("LORA_SLOT_VERSION") == slot.VERSION
    assert define("LORA_ALIGN") == slot.ALIGN
    assert define("LORA_SIGNAL_LINE_BYTES") == region.LINE_BYTES
    enums = {name: int(value) for name, value in re.findall(r"LORA_(\w+) = (\d+)", HEADER)}
    for name in ("DECODE", "PREFILL", "HAS_IN_MAP", "HAS_OUT_MAP", "WAITS_FOR_WEIGHTS", "OK", "FAILED"):
        assert enums.pop(name) == getattr(slot, name)
    assert enums == {name.upper(): code for code, name in enumerate(slot.DTYPES)}


OTHERS = {"step_class", "flags", "windows", "seq", "payload_bytes", "budget_us", "pushed_ns"}
WINDOWS = st.lists(st.tuples(U32, U32), min_size=1, max_size=slot.MAX_WINDOWS).map(tuple)
REQUESTS = st.builds(
    RequestHeader,
    step_class=st.integers(0, 255),
    flags=st.integers(0, 255),
    windows=WINDOWS,
    **dict.fromkeys(("seq", "payload_bytes", "budget_us", "pushed_ns"), U64),
    **dict.fromkeys(sorted({*RequestHeader._fields} - OTHERS), U32),
)
RESPONSES = st.builds(
    ResponseHeader,
    status=st.integers(0, 2**16 - 1),
    **dict.fromkeys(("client", "epoch", "slot", "dtype", "num_rows", "width"), U32),
    **dict.fromkeys(("seq", "payload_bytes", "received_ns", "started_ns", "done_ns"), U64),
)


def field_at(fields, name):
    """Offset and struct code of a field."""
    offset = 0
    for field, code, count in fields:
        if field == name:
            return offset, f"<{count}{code}"
        offset += struct.calcsize(f"<{count}{code}")
    raise KeyError(name)


@given(header=st.one_of(REQUESTS, RESPONSES))
def test_headers_round_trip_and_lie_where_the_table_says(header):
    memory = bytearray(b"\xff" * slot.HEADER_BYTES)
    header.pack_into(memoryview(memory))
    assert type(header).unpack_from(memoryview(memory)) == header
    fields = slot.REQUEST_FIELDS if isinstance(header, RequestHeader) else slot.RESPONSE_FIELDS
    for name, value in header._asdict().items():
        if name != "windows":
            offset, code = field_at(fields, name)
            assert struct.unpack_from(code, memory, offset) == (value,), name
    if isinstance(header, RequestHeader):
        offset, code = field_at(fields, "out_windows")
        flat = [bound for window in header.windows for bound in window]
        assert list(struct.unpack_from(code, memory, offset)) == flat + [0] * (6 - len(flat))
        assert f"client {header.client} slot {header.slot} seq {header.seq}" in header.where


@pytest.mark.parametrize("kind", [RequestHeader, ResponseHeader])
@pytest.mark.parametrize("field", ["magic", "version"])
def test_foreign_headers_are_refused(kind, field):
    memory = bytearray(slot.HEADER_BYTES)
    with pytest.raises(ProtocolError, match="got magic 0x0"):
        kind.unpack_from(memoryview(memory))
    windows = {"windows": ((0, 1),)} if kind is RequestHeader else {}
    kind._make([0] * len(kind._fields))._replace(**windows).pack_into(memoryview(memory))
    kind.unpack_from(memoryview(memory))
    memory[field_at(slot.REQUEST_FIELDS, field)[0]] ^= 1
    with pytest.raises(ProtocolError, match=f"expected .* version {slot.VERSION}"):
        kind.unpack_from(memoryview(memory))


@pytest.mark.parametrize("count", [0, 4, 2**32 - 1])
def test_a_header_has_one_to_three_windows(count):
    memory = bytearray(slot.HEADER_BYTES)
    RequestHeader._make([0] * len(RequestHeader._fields))._replace(windows=((0, 1),)).pack_into(memoryview(memory))
    offset, code = field_at(slot.REQUEST_FIELDS, "num_windows")
    struct.pack_into(code, memory, offset, count)
    with pytest.raises(ProtocolError, match=f"got {count} output windows"):
        RequestHeader.unpack_from(memoryview(memory))


@given(
    segments=st.integers(0, 999),
    entries=st.integers(0, 999),
    flags=st.integers(0, 3),
    row_bytes=st.integers(0, 9**6),
    scales=st.integers(0, 99),
)
def test_parts_of_a_request_are_aligned_and_disjoint(segments, entries, flags, row_bytes, scales):
    at = slot.request_offsets(segments, entries, flags, row_bytes, scales)
    in_map, out_map = 4 * entries * bool(flags & slot.HAS_IN_MAP), 4 * entries * bool(flags & slot.HAS_OUT_MAP)
    parts = [(0, slot.HEADER_BYTES), (at.segments, 16 * segments), (at.in_map, in_map), (at.out_map, out_map)]
    parts += [(at.weights, out_map), (at.scales, 4 * scales), (at.rows, row_bytes)]
    end = 0
    for offset, size in parts:
        assert offset >= end and offset % 16 == 0
        end = offset + size
    assert at.end == end and at.rows % slot.ALIGN == 0
    gaps = at.end - sum(size for _, size in parts)
    assert gaps < 3 * 16 + slot.ALIGN, "absent parts take no space"


@given(epoch=U32, seq=SEQ, other=U32)
def test_signal_words(epoch, seq, other):
    word = slot.signal(epoch, seq)
    assert 0 <= word < 2**64 and slot.signalled_seq(word, epoch) == seq
    assert slot.signalled_seq(word, other) == (seq if (epoch - other) % 2**16 == 0 else 0)
    assert slot.signalled_seq(0, epoch) == 0, "a fresh region says nothing in any epoch"
    assert seq == 2**48 - 1 or slot.signal(epoch, seq + 1) > word, "words of one epoch grow"


@settings(deadline=None, max_examples=60)
@given(preset=st.sampled_from(sorted(spec.PRESETS)), rows=st.integers(1, 512), depth=st.integers(1, 8))
def test_slots_hold_the_largest_message_at_every_site(preset, rows, depth):
    model = spec.PRESETS[preset]
    layout, smaller = RegionLayout.for_model(model, rows, depth), RegionLayout.for_model(model, rows, depth, "e4m3")
    for site in model.sites():
        for dtype, item in enumerate(slot.ELEMENT_BYTES):
            flags, scales = slot.HAS_IN_MAP | slot.HAS_OUT_MAP, slot.num_scales(rows, dtype)
            of_wire = smaller if dtype == slot.E4M3 else layout
            request = slot.request_offsets(rows, rows, flags, rows * model.in_width(site) * item, scales)
            assert request.end <= of_wire.request_bytes
            assert slot.response_offsets(rows, model.out_width(site), dtype).end <= of_wire.response_bytes


@given(depth=st.integers(1, 5), request=st.integers(1, 3), response=st.integers(1, 3))
def test_slots_do_not_overlap(depth, request, response):
    layout = RegionLayout(depth, request * region.PAGE_BYTES, response * region.PAGE_BYTES)
    memory = bytearray(layout.nbytes)
    shared = Region(memoryview(memory), layout)
    shared.write_geometry()
    assert Region.read_geometry(shared.memory) == layout
    lines = bytes(memory[: region.PAGE_BYTES])
    for seq in range(depth):
        shared.request(seq)[:] = bytes([seq + 1]) * layout.request_bytes
        shared.response(seq)[:] = bytes([seq + 101]) * layout.response_bytes
    for seq in range(depth):
        assert set(shared.request(seq + depth)) == {seq + 1} and set(shared.response(seq + depth)) == {seq + 101}
    assert bytes(memory[: region.PAGE_BYTES]) == lines, "slots keep off the lines"
    assert region.PAGE_BYTES + sum(map(len, shared._requests + shared._responses)) == layout.nbytes
    for line, view in enumerate((shared.request_signal, shared.response_signal, shared.parked)):
        view.cast("B")[0] = 200 + line
        assert memory[line * region.LINE_BYTES] == 200 + line


def test_foreign_regions_are_refused():
    layout = RegionLayout(2, 4096, 4096)
    with pytest.raises(ProtocolError, match="got 100 bytes, expected"):
        Region(memoryview(bytearray(100)), layout)
    with pytest.raises(ProtocolError, match="got magic 0x0"):
        Region.read_geometry(memoryview(bytearray(4096)))


MESSAGES = [Hello(1, 2, b"k"), Welcome(4, 4096, 8192), Refused("lease", "no"), Order(1, 2, 3, 4)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_round_trip_and_refuse_others(message):
    data = messages.encode(message)
    assert messages.decode(data, type(message)) == message
    fields = msgspec.msgpack.decode(data)
    for bad in ({**fields, "more": 1}, {**fields, "type": "other"}, dict(list(fields.items())[:1]), [], None):
        with pytest.raises(ProtocolError, match="control message"):
            messages.decode(msgspec.msgpack.encode(bad), type(message))
    for other in MESSAGES:
        if type(other) is not type(message):
            with pytest.raises(ProtocolError):
                messages.decode(data, type(other))


@example(data=b"\x81\xa3\x00\x00\x80")  # a key that is not UTF-8
@given(data=st.binary(max_size=64))
def test_garbage_is_a_protocol_error(data):
    for expected in map(type, MESSAGES):
        try:
            assert isinstance(messages.decode(data, expected), expected)
        except ProtocolError:
            continue


def test_oversized_messages_are_not_parsed():
    data = messages.encode(Hello(1, 1, b"k" * messages.MAX_MESSAGE_BYTES))
    with pytest.raises(ProtocolError, match=f"got {len(data)} bytes, expected at most {messages.MAX_MESSAGE_BYTES}"):
        messages.decode(data, Hello)


@pytest.mark.parametrize("code", [*errors.BY_CODE, "from-the-future"])
def test_refused_rebuilds_the_typed_error(code):
    kind = errors.BY_CODE.get(code, errors.LoraServerError)
    with pytest.raises(kind, match="why") as caught:
        messages.decode_welcome(messages.encode(Refused(code, "why")))
    assert type(caught.value) is kind
    assert messages.decode_welcome(messages.encode(Welcome(1, 2, 3))) == Welcome(1, 2, 3)


def test_a_channel_sees_a_server_that_comes_back_within_moments():
    """However long it was away: attempts to connect do not get rarer, and between two every call fails. As gRPC would
    have it, 14 attempts take minutes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        began = time.monotonic()
        with open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            channel.subscribe(lambda state: None, try_to_connect=True)
            for _ in range(14):
                listener.accept()[0].close()
    assert time.monotonic() - began < 100


FLAGS = slot.HAS_IN_MAP | slot.HAS_OUT_MAP


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 2000), depth=st.integers(1, 4), wire=...)
def test_parts_hold_every_table_and_are_whole_pages(rows: int, depth: int, wire: slot.Wire):
    layout = RegionLayout.for_model(spec_of("mixtral"), rows, depth, wire)
    at = slot.request_offsets(rows, rows, FLAGS, 0, slot.num_scales(rows, layout.widest))
    for index, (begin, end) in enumerate(layout.tables()):
        start = PAGE_BYTES + index * layout.request_bytes
        assert begin == start and begin + at.rows <= end <= start + layout.request_bytes
        assert end - begin < at.rows + PAGE_BYTES, "no page of rows alone"
    for index, (begin, end) in enumerate(layout.answers()):
        start = PAGE_BYTES + depth * layout.request_bytes + index * layout.response_bytes
        assert begin == start and ANSWER_BYTES <= end - begin <= layout.response_bytes
    parts = [*layout.tables(), *layout.answers()]
    assert all(not number % PAGE_BYTES for part in parts for number in part)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(parts))
    assert _used_parts(layout, mirror=True) == [(0, PAGE_BYTES), *layout.tables()]
    assert _used_parts(layout, mirror=False) == [(0, layout.nbytes)], "rows lie there"
    silent = RegionLayout(depth, 8192, 4096)
    assert silent.tables() == [(4096 + slot * 8192, 12288 + slot * 8192) for slot in range(depth)], "all of a request"
    assert RegionLayout(1, 8192, 4096, table_bytes=9000).tables() == [(4096, 12288)], "no more than there is"


@pytest.mark.emulator
def test_a_gpus_client_registers_tables_and_heads_of_answers(tmp_path, tiny_adapters):
    """And its state's page; copies of anything else are refused, and nothing stays registered behind it."""
    emulated_gpu.compile_all()
    host, before = Host(tmp_path), list(emulated_gpu.PINNED)
    steps = host.join(host.load(tiny_adapters["all"]))
    link, layout = steps.link, steps.link.region.layout
    begin, home = emulated_gpu._address(link.region.memory), emulated_gpu._address(link.answers._page)
    ours = [part for part in emulated_gpu.PINNED if part not in before]
    parts = [(begin + first, begin + end) for first, end in (*layout.tables(), *layout.answers())]
    assert ours == [*parts, (home, home + PAGE_BYTES)]
    assert sum(end - first for first, end in ours) < layout.nbytes
    assert isinstance(steps.step(), torch.Tensor)
    steps.handle += 1
    assert steps.step(seconds=0.2) == "unknown_adapter", "with its text"
    for other in (link.region.request(0)[PAGE_BYTES:], link.region.memory[:128]):
        with pytest.raises(RuntimeError, match="not pinned"):
            link.queue.send(link.memory.response_at(0), other)
    link.close()
    assert before == emulated_gpu.PINNED
    host.close()
