"""What large steps touched goes back when small ones follow; nothing that is being read does."""

import gc
import os
from pathlib import Path

import pytest

from client_connector.client import Client
from lora_server.transport.mapping import Mapping
from lora_server.transport.shm import ShmLink, create_memory
from lora_server.transport.slack import Slack
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout
from tests.chaos.caller import Caller
from tests.support.gpu.emulated_link import EmulatedServer, MemfdMemory
from tests.support.workload import spec_of

LAYOUT = RegionLayout(depth=2, request_bytes=4 << 20, response_bytes=8 << 20)


@pytest.fixture
def memory():
    """Every byte of it is 1: descriptor, both sides' mappings."""
    fd, mapping = create_memory("test", LAYOUT.nbytes)
    other = Mapping(LAYOUT.nbytes, fd)
    mapping.view[:] = b"\1" * LAYOUT.nbytes
    yield fd, mapping, other
    os.close(fd)


def held(fd):
    return os.fstat(fd).st_blocks * 512


def test_what_was_not_needed_goes_back_when_nothing_is_outstanding(memory):
    """An answer that claims more than its slot takes no other with it."""
    fd, mapping, other = memory
    one = Slack(mapping, LAYOUT, keep_seconds=0.0)
    one.consumed(1 << 40, 1 << 40, idle=True)
    for _ in range(50):
        one.consumed(LAYOUT.request_bytes, LAYOUT.response_bytes, idle=True)
    assert held(fd) == LAYOUT.nbytes, "all of it is needed"
    for _ in range(50):
        one.consumed(5000, 100, idle=False)
    assert held(fd) == LAYOUT.nbytes, "a step may read it"
    for _ in range(50):
        one.consumed(5000, 100, idle=True)
    assert held(fd) == PAGE_BYTES * (1 + LAYOUT.depth * (2 + 1))
    for view in (mapping.view, other.view):
        region = Region(view, LAYOUT)
        for seq in (1, 2):
            assert bytes(region.request(seq)[:5000]) == b"\1" * 5000
            assert bytes(region.response(seq)[:100]) == b"\1" * 100
            assert bytes(region.request(seq)[8192:]) == bytes(LAYOUT.request_bytes - 8192), "zeros, on both sides"
    mapping.drop()
    mapping.give_back(PAGE_BYTES, 2 * PAGE_BYTES)  # which changes nothing


class ShmServer(EmulatedServer):
    """Of clients without a device."""

    device = staticmethod(lambda: None)

    def connect(self, hello):
        slack = {"keep_seconds": 0.0, "give_bytes": PAGE_BYTES}
        return [ShmLink(listener.address, hello, shard, **slack) for shard, listener in enumerate(self.listeners)]


class PinningServer(ShmServer):
    """Whose shards' GPUs copy from and to the slots."""

    device = MemfdMemory


def regions():
    """Bytes of clients' regions that are mapped here, on either side."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            ours = "memfd:lora-client" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("kind", [ShmServer, PinningServer])
def test_an_engine_whose_prompts_are_done_gives_back_what_they_took(tmp_path, tiny_adapters, kind, stack):
    """Its deltas stay, whatever went and came again; but what a GPU reads and writes has to stay where it is."""
    server = kind(tmp_path, spec_of("mixtral"), {"all": tiny_adapters["all"]}, mirror="no")
    stack.callback(server.close)
    client = Client(server)
    stack.callback(client.close)
    gc.collect()
    others = regions()  # what earlier tests left mapped
    prompt, token = Caller(client, 1024, "all"), Caller(client, 1, "all")  # a prompt is more than all slots hold
    for _ in range(2):
        assert all(one.step() for _ in range(8) for one in (prompt, token, token))
        prompt.step()
        touched = regions() - others
        for _ in range(40 if kind is ShmServer else 4):  # a page behind each step that leaves nothing outstanding
            assert all(token.step() for _ in range(25))
            if regions() - others < touched / 2:
                break
        left = regions() - others
        assert left < touched / 2 if kind is ShmServer else left >= touched
