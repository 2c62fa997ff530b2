"""Rows on their way, exact or in 8 bits: both ends find the same values, wherever a transport keeps them."""

import time

import pytest
import torch

from lora_server.errors import ProtocolError
from lora_server.transport import e4m3
from lora_server.transport.rows import TORCH_DTYPES, MirrorRows, SlotRows, mirror_bytes
from lora_server.wire import slot
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader
from tests.support.echo import DEVICES, KINDS, echo_shard
from tests.support.echo_client import LAYOUT, SECONDS
from tests.support.workload import spec_of


@pytest.fixture(params=KINDS)
def shard(request, tmp_path):
    with echo_shard(request.param, tmp_path) as found:
        found.answer = double
        yield found


def double(connection, seq):
    """Answer with every row of the request, doubled; the slot's bytes are what travels."""
    header = RequestHeader.unpack_from(connection.region.request(seq))
    rows = connection.rows.request(header)
    assert rows.shape == (header.num_rows, header.in_end - header.in_begin)
    if header.dtype == slot.E4M3:
        rows = e4m3.expand(rows, SlotRows(connection.region).request_scales(header))
    connection.rows.answer(header, rows[:, : header.out_width] * 2)
    return slot.response_offsets(header.num_out_rows, header.out_width, header.dtype).end


def header_of(link, seq, rows, width, out_width, dtype):
    nbytes = rows * width * slot.ELEMENT_BYTES[dtype]
    at = slot.request_offsets(0, rows, 0, nbytes, slot.num_scales(rows, dtype))
    numbers = (0, 0, 1, 1, seq, seq % LAYOUT.depth, 0, 0, dtype, rows, rows, 0, rows, 0, width)
    return RequestHeader(*numbers, ((0, out_width),), at.end - slot.HEADER_BYTES, 0, 0)


def send(link, seq, x, rows, out_width, dtype):
    """A step with these rows of `x`; its header, once it is answered."""
    header = header_of(link, seq, len(rows), x.shape[1], out_width, dtype)
    header.pack_into(link.region.request(seq))
    link.put_rows(header, x, rows)
    link.push(seq, slot.HEADER_BYTES + header.payload_bytes)
    link.wait(seq, time.monotonic() + SECONDS)
    return header


@pytest.mark.parametrize("width", [8, 24, 5])
@pytest.mark.parametrize("dtype", range(len(slot.DTYPES)))
def test_rows_go_there_and_back(shard, dtype, width):
    """In every slot, next to each other's tables."""
    if shard.kind == "device mirror" and dtype == 0:
        pytest.skip("a mirror holds rows of 16 bits, or of 8")
    link, pick = shard.join(1), torch.Generator().manual_seed(dtype)
    for seq in range(1, 2 * LAYOUT.depth + 1):
        x = torch.randn(9, width, generator=pick)
        x = x.to(TORCH_DTYPES[dtype]) if dtype != slot.E4M3 else x.sign() * 3.0  # which 8 bits hold, and their double
        rows = torch.randperm(9, generator=pick)[: seq % 4 * 2]
        header = send(link, seq, x, rows, width - 1, dtype)
        assert torch.equal(link.rows.deltas(header, x), x[rows][:, :-1] * 2)


@pytest.mark.parametrize("shard", ["shm", *DEVICES], indirect=True)
@pytest.mark.parametrize("dtype", TORCH_DTYPES[: slot.E4M3], ids=str)
def test_codes_and_scales_are_the_hosts_wherever_they_lie(shard, dtype):
    """Of an engine's every dtype, with rows of zeros and of what is no number; those of the answer, too."""
    link, seen, pick = shard.join(1), [], torch.Generator().manual_seed(4)

    def keep(connection, seq):
        header = RequestHeader.unpack_from(connection.region.request(seq))
        scales = SlotRows(connection.region).request_scales(header)
        seen.append((connection.rows.request(header).clone(), scales.clone()))
        return double(connection, seq)

    shard.answer, x = keep, torch.ldexp(torch.randn(9, 40, generator=pick), torch.arange(9)[:, None] * 3 - 13).to(dtype)
    x[2], x[4, 3], x[6, 39] = 0, float("nan"), float("-inf")
    rows = torch.tensor([8, 2, 4, 0, 6, 3])
    header = send(link, 1, x, rows, 40, slot.E4M3)
    codes, scales = torch.zeros(6, 40, dtype=torch.float8_e4m3fn), torch.zeros(6)
    e4m3.quantise(x[rows], codes, scales)
    ((got, their_scales),) = seen
    assert same_bits(got, codes) and torch.equal(their_scales, scales)
    doubled = e4m3.expand(codes, scales) * 2
    e4m3.quantise(doubled, codes, scales)
    assert same_bits(link.rows.response(header), codes) and torch.equal(link.rows.response_scales(header), scales)
    ours = link.rows.deltas(header, x)
    torch.testing.assert_close(ours, e4m3.expand(codes, scales).to(dtype), rtol=0, atol=0, equal_nan=True)
    assert ours.dtype == dtype and ours[:, 0].isnan().tolist() == [False, False, True, False, True, False]


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shard", DEVICES[1:], indirect=True)
def test_a_mirror_refuses_rows_of_32_bits(shard):
    link = shard.join(1)
    with pytest.raises(ProtocolError, match="got float32 rows in GPU memory, expected bfloat16 or float16"):
        link.put_rows(header_of(link, 1, 2, 8, 8, 0), torch.zeros(2, 8), torch.arange(2))


@pytest.mark.parametrize("shard", ["inproc", "shm", "tcp"], indirect=True)
def test_a_link_without_a_device_routes_nothing(shard):
    link = shard.join(1)
    with pytest.raises(ProtocolError, match="routes nothing"):
        link.put_routed(header_of(link, 1, 2, 8, 8, 1), torch.zeros(2, 8), None, False)


@pytest.mark.parametrize(("wire", "dtype"), [("exact", 1), ("e4m3", slot.E4M3)])
def test_rows_and_scales_of_two_slots_of_a_mirror_never_overlap(wire, dtype):
    spec = spec_of("mixtral")
    sites, layout = list(spec.sites()), RegionLayout.for_model(spec, 24, 2, wire)
    widest = max(map(spec.in_width, sites)), max(map(spec.out_width, sites))
    mirror = MirrorRows(torch.zeros(mirror_bytes(layout), dtype=torch.uint8), layout)
    for seq in (7, 8):
        header = header_of(None, seq, 24, *widest, dtype)
        parts = [mirror.request(header), mirror.response(header)]
        parts += [mirror.response_scales(header)] if dtype == slot.E4M3 else []
        for part in parts:
            assert part.is_contiguous() and not part.view(torch.uint8).any()
            part.view(torch.uint8).fill_(1)
    assert mirror_bytes(layout) < layout.nbytes
