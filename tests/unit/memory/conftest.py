"""Stores of tiny-mixtral's weights, which are closed when a test is over."""

import contextlib

import pytest
import torch

from lora_server.memory.pages import PagePool
from lora_server.placement import Layout, Placement
from tests.support.stores import Gate, cpu_store, paged_store
from tests.support.workload import spec_of


@pytest.fixture
def make_store(gate):
    """Make a shard's store: in `pages`, or in so many bytes of host memory."""
    with contextlib.ExitStack() as stack:

        def make(capacity=1 << 30, layout="ep1-pp1", shard=0, dtype=torch.float32, pages=0, **options):
            placement = Placement(spec_of("mixtral"), Layout.parse(layout))
            if pages:
                store = paged_store(placement, shard, dtype, PagePool(pages, "cpu"), **options)
            else:
                store = cpu_store(placement, shard, dtype, capacity, **options)
            stack.callback(store.close)
            return store

        yield make
        gate.open()


@pytest.fixture
def gate():
    return Gate()
