"""Rows in 8 bits on their way: the host's codes and scales, whoever makes them and wherever they lie."""

from __future__ import annotations

import time

import pytest
import torch

from lora_server.transport import e4m3
from lora_server.transport.rows import TORCH_DTYPES, SlotRows, TwinRows, twin_bytes
from lora_server.wire import slot
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader
from tests.support.echo import DEVICES, SECONDS, double, echo_shard, header_of
from tests.support.workload import spec_of


@pytest.fixture(params=["shm", *DEVICES])
def shard(request, tmp_path):
    with echo_shard(request.param, tmp_path) as found:
        yield found


@pytest.mark.parametrize("dtype", TORCH_DTYPES[: slot.E4M3], ids=str)
def test_codes_and_scales_are_the_hosts_wherever_they_lie(shard, dtype):
    """Of an engine's every dtype, with rows of zeros and of what is no number; those of the answer, too."""
    link, seen, pick = shard.join(1), [], torch.Generator().manual_seed(4)

    def keep(connection, seq):
        header = RequestHeader.unpack_from(connection.region.request(seq))
        seen.append(
            (connection.rows.request(header).clone(), SlotRows(connection.region).request_scales(header).clone())
        )
        return double(connection, seq)

    shard.answer, x = keep, torch.ldexp(torch.randn(9, 40, generator=pick), torch.arange(9)[:, None] * 3 - 13).to(dtype)
    x[2], x[4, 3], x[6, 39] = 0, float("nan"), float("-inf")
    rows = torch.tensor([8, 2, 4, 0, 6, 3])
    header = header_of(link, 1, len(rows), 40, 40, slot.E4M3)
    header.pack_into(link.region.request(1))
    link.put_rows(header, x, rows)
    link.push(1, slot.HEADER_BYTES + header.payload_bytes)
    link.wait(1, time.monotonic() + SECONDS)
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
    link.close()


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_twin_has_room_for_whatever_its_region_has():
    """No two slots' rows and scales overlap, exact or in 8 bits."""
    for wire, dtype in (("exact", 1), ("e4m3", slot.E4M3)):
        layout = RegionLayout.for_model(spec_of("mixtral"), 24, 2, wire)
        used, rows = torch.zeros(twin_bytes(layout), dtype=torch.uint8), 24
        twin = TwinRows(used, layout)
        for seq in (7, 8):
            header = header_of(None, seq, rows, *widths(spec_of("mixtral")), dtype)
            parts = [twin.request(header), twin.response(header)]
            parts += [twin.response_scales(header)] if dtype == slot.E4M3 else []
            for part in parts:
                assert part.is_contiguous() and not part.view(torch.uint8).any(), wire
                part.view(torch.uint8).fill_(1)
        assert twin_bytes(layout) < layout.nbytes


def widths(spec):
    """The widest rows in, and out."""
    sites = list(spec.sites())
    return max(spec.in_width(site) for site in sites), max(spec.out_width(site) for site in sites)
