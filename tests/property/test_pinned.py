"""Which bytes of a region a client pins: what its GPU and copies take, and no rows that lie elsewhere."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_server.transport.cuda_ipc import _used_parts
from lora_server.transport.gpu.link import ANSWER_BYTES
from lora_server.wire import slot
from lora_server.wire.region import PAGE_BYTES, RegionLayout
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_host import Host
from tests.support.workload import spec_of

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
    assert _used_parts(layout, twin=True) == [(0, PAGE_BYTES), *layout.tables()]
    assert _used_parts(layout, twin=False) == [(0, layout.nbytes)], "rows lie there"
    silent = RegionLayout(depth, 8192, 4096)
    assert silent.tables() == [(4096 + slot * 8192, 12288 + slot * 8192) for slot in range(depth)], "all of a request"
    assert RegionLayout(1, 8192, 4096, table_bytes=9000).tables() == [(4096, 12288)], "no more than there is"


@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
def test_a_gpus_client_registers_tables_and_heads_of_answers(tmp_path, tiny_adapters):
    """And its state's page; copies of anything else are refused, and nothing stays registered behind it."""
    emulated_gpu.compile_all()
    host, before = Host(tmp_path), list(emulated_gpu.PINNED)
    steps = host.join(host.load(tiny_adapters["all"]))
    link, layout = steps.link, steps.link.region.layout
    begin, home = emulated_gpu._address(link.region.memory), emulated_gpu._address(link._home)
    ours = [part for part in emulated_gpu.PINNED if part not in before]
    parts = [(begin + first, begin + end) for first, end in (*layout.tables(), *layout.answers())]
    assert ours == [(home, home + PAGE_BYTES), *parts]
    assert sum(end - first for first, end in ours) < layout.nbytes
    assert isinstance(steps.step(), torch.Tensor)
    steps.handle += 1
    assert steps.step(seconds=0.2) == "unknown_adapter", "with its text"
    for other in (link.region.request(0)[PAGE_BYTES:], link.region.memory[:128]):
        with pytest.raises(RuntimeError, match="not pinned"):
            link.queue.send(link.response_address(0), other)
    link.close()
    assert before == emulated_gpu.PINNED
    host.close()
