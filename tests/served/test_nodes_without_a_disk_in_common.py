"""Two nodes that share no directory: what node 0 was told of, node 1 serves from files that node 0 sent."""

from __future__ import annotations

import shutil

import psutil
import pytest

from client_connector.transformers import attach
from lora_server.adapters import CONFIG, WEIGHTS
from lora_server.demo.engine import Sequence, generate
from lora_server.demo.launch import launch
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel
from tests.support.serving import HANG_SECONDS, all_gone, status, until
from tests.support.workload import NEW_TOKENS, workload

OTHERS = ("shard 2", "shard 3")


class Nodes:
    """Node 0, which alone is told of `--adapters`, and node 1."""

    def __init__(self, load, tmp_path):
        self.load, self.cache = load, tmp_path / "data1" / "disk-cache"
        token = tmp_path / "token"
        token.write_text("the same on both nodes\n")
        common = ["--base-model", str(load.base), "--layout", "ep2-pp2", "--nodes", "2"]
        common += ["--join-token-file", str(token)]
        own = ("--adapters", str(load.adapters), "--adapter-root", str(tmp_path))
        self.first = launch(tmp_path / "log0", *common, *own, "--data-dir", str(tmp_path / "data0"))
        more = ("--node-rank", "1", "--controller", self.first.address, "--data-dir", str(tmp_path / "data1"))
        self.second = launch(tmp_path / "log1", *common, *more)

    def ask(self, method, **fields):
        with open_channel(self.first.address) as channel:
            stub = getattr(rpc.AdaptersStub(channel), method)
            return stub(getattr(pb, f"{method}AdapterRequest")(**fields), timeout=HANG_SECONDS)

    def fetched(self):
        """Adapters that node 1's shards fetched, together."""
        lines = self.first.get("/metrics")[1].splitlines()
        wanted = [f'lora_server_fetches_total{{process="{one}"}} ' for one in OTHERS]
        return sum(float(line.removeprefix(start)) for line in lines for start in wanted if line.startswith(start))

    def versions(self):
        """Whose files lie on node 1."""
        return {one.name.split(".")[0] for one in self.cache.iterdir() if one.is_dir()}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    it = Nodes(workload("mixtral"), tmp_path_factory.mktemp("nodes"))
    try:
        it.first.wait_ready()
        yield it
    finally:
        assert (it.second.stop(), it.first.stop()) == (0, 0)


def test_all_that_node_0_has_is_served(nodes):
    """From its --adapters, and what was added, whose source is gone; once for both shards of node 1."""
    load = nodes.load
    source = nodes.cache.parent.parent / "source"
    shutil.copytree(load.paths["qv"], source)
    assert nodes.ask("Add", name="late", uri=str(source)).name == "late"
    shutil.rmtree(source)
    with attach(load.model, server=nodes.first.address, timeout_seconds=HANG_SECONDS) as lora:
        with lora.adapters(load.names):
            load.check(generate(load.model, load.batch, NEW_TOKENS))
        index = load.names.index("qv")
        late = Sequence(load.batch[index].prompt, "late")
        with lora.adapters(["late"]):
            assert generate(load.model, [late], NEW_TOKENS)[0].tokens == load.expected[index].tokens
    contents = len(load.paths)  # "late" has that of "qv"
    assert len(nodes.versions()) == contents
    until(lambda: nodes.fetched() >= contents, "counters are told", HANG_SECONDS)
    assert nodes.fetched() == contents


def test_damaged_files_come_again_also_while_the_controller_does(nodes):
    load = nodes.load
    with (
        attach(load.model, server=nodes.first.address, timeout_seconds=HANG_SECONDS) as lora,
        lora.adapters(load.names),
    ):
        load.check(generate(load.model, load.batch, NEW_TOKENS))
        for weights in nodes.cache.glob(f"*/{WEIGHTS}"):
            content = bytearray(weights.read_bytes())
            content[-8:] = bytes(8)
            weights.write_bytes(content)
        reply = status(nodes.first.address)
        killed = [psutil.Process(pid) for pid in (reply.pid, reply.shards[2].pid, reply.shards[3].pid)]
        for process in killed:
            process.kill()
        all_gone(killed)
        nodes.first.wait_ready()
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    assert "files of the disk cache were changed; fetching them again" in nodes.second.log.read_text()


def test_what_is_replaced_or_removed_goes_from_node_1(nodes):
    before = nodes.versions()
    served = nodes.ask("Get", name="late").version
    path = nodes.cache.parent.parent / "another"
    shutil.copytree(nodes.load.paths["attention"], path)
    config = path / CONFIG
    config.write_text(config.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    updated = nodes.ask("Update", name="late", uri=str(path)).version
    assert updated not in before and served in before
    until(lambda: updated in nodes.versions(), "the new one is there", HANG_SECONDS)
    nodes.ask("Remove", name="late")
    until(lambda: updated not in nodes.versions(), "it went", HANG_SECONDS)
    assert served in nodes.versions(), "'qv' means it"
