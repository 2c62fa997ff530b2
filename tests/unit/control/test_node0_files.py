"""Files of adapters go from node 0 to shards of other nodes: complete or not at all, and delay no client."""

import os
import shutil
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import grpc
import pytest

from lora_server import errors
from lora_server.adapters import WEIGHTS, open_adapter
from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.control.rpc import files as sending
from lora_server.control.rpc.files import FilesService
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.daemon.files import Node0
from lora_server.placement import Layout
from lora_server.sources.cache import DiskCache
from lora_server.sources.fetch import Fetcher
from lora_server.timings import DEFAULTS, Timings
from lora_server.units import Size
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel, translate
from tests.support.controllers import ToldShard
from tests.support.far import left
from tests.support.serving import HANG_SECONDS, until
from tests.support.signed import signed, signed_by_shard
from tests.support.workload import spec_of

URL = "node0:///law"


class Node:
    """Node 0 with one adapter, `law`, and a node that has a cache and the name of a registered shard."""

    def __init__(self, adapter, tmp_path, stack, timings):
        self.adapter, self.files = tmp_path / "law", FilesService
        shutil.copytree(adapter, self.adapter)
        agreement = Agreement(spec_of("mixtral"), Layout.parse("ep1-pp1"), "float32", "independent", 64)
        self.controller = Controller(agreement, timings=timings)
        self.controller.adapters.sync.sends = True
        self.shard = ToldShard(self.controller)
        self.record = self.controller.adapters.rollout.register("law", str(self.adapter))[0]
        self.control, self.address = None, "127.0.0.1:0"
        self.serve()
        self.cache = tmp_path / "cache"
        self.node0 = Node0(self.address, Credentials(), 0, self.shard.memory.instance)
        self.fetches_within(timings)
        stack.callback(self.shard.close)
        stack.callback(self.die)

    def fetches_within(self, timings):
        self.node0 = replace(self.node0, address=self.address, timings=timings)
        self.instance = self.shard.memory.instance
        self.fetcher = Fetcher(DiskCache(self.cache, Size(nbytes=1 << 30)), spec_of("mixtral"), self.node0.files)

    def serve(self):
        """At the same address as before."""
        self.control = ControlServer(self.controller, self.address, Doorkeeper(""), files=self.files)
        self.address = f"127.0.0.1:{self.control.port}"

    def die(self):
        """As a controller that is killed."""
        if self.control is not None:
            self.control.close(0.0)
        self.control = None

    def fetch(self, at_piece=lambda: None):
        return self.fetcher.fetch(URL, self.record.version, HANG_SECONDS, lambda: bool(at_piece()))

    def read(self, channel):
        request = signed_by_shard(pb.ReadRequest(version=self.record.version, name=WEIGHTS), 0, self.instance)
        return rpc.ShardsStub(channel).Read(request, timeout=HANG_SECONDS)


@pytest.fixture
def node(request, tiny_adapters, tmp_path, stack):
    return Node(tiny_adapters["all"], tmp_path, stack, getattr(request, "param", DEFAULTS))


def is_right(lease, node):
    with lease, open_adapter(lease.path, spec_of("mixtral")) as adapter:
        return adapter.version() == node.record.version


def answers_heartbeats(node, channel):
    for _ in range(50):
        lease = node.controller.clients.leases.grant("engine")
        request = signed(pb.HeartbeatRequest(), lease.proof)
        assert not call(rpc.ClientsStub(channel).Heartbeat, request, server="", seconds=HANG_SECONDS).forgot
    return True


def refused(reading, error):
    """The text of the error that a read ends with."""
    with pytest.raises(error) as ended:
        try:
            list(reading)
        except grpc.RpcError as failure:
            raise translate(failure, "") from None
    return str(ended.value)


class Dying:
    """Node 0 sends the weights up to each of these parts, and no more until it is killed: once some of it has come."""

    def __init__(self, node, parts, comes_back):
        self.node, self.comes_back, self.deaths = node, comes_back, 0
        nbytes = (node.adapter / WEIGHTS).stat().st_size
        self.limits, self.killed = [nbytes * part for part in parts], threading.Event()
        self.begun = []  # where calls began
        node.files = partial(Sending, self)
        node.die()
        node.serve()

    def before_piece(self, at):
        if self.limits and at >= self.limits[0]:
            assert self.killed.wait(HANG_SECONDS)

    def at_piece(self):
        for coming in self.node.cache.glob(f"fetching-*/{WEIGHTS}"):
            if self.limits and len(self.begun) > self.deaths and coming.stat().st_size > self.begun[-1]:
                self.deaths += 1
                self.node.die()
                self.limits.pop(0)
                self.killed.set()
                self.killed = threading.Event()
                if self.comes_back:
                    self.node.serve()


class Sending(FilesService):
    """In small pieces."""

    def __init__(self, dying, *arguments):
        super().__init__(*arguments, piece_bytes=1 << 12)
        self.dying = dying

    def read(self, request, *more):
        if request.name == WEIGHTS:
            self.dying.begun.append(request.begin)
        return super().read(request, *more)

    def piece(self, file, at):
        if file.name == WEIGHTS:
            self.dying.before_piece(at)
        return super().piece(file, at)


def test_a_broken_transfer_goes_on_behind_what_came(node):
    dying = Dying(node, (0.25, 0.5, 0.75), comes_back=True)
    assert is_right(node.fetch(dying.at_piece), node)
    assert dying.deaths == 3 and len(dying.begun) == 4
    assert dying.begun == sorted(set(dying.begun)), "what came is not sent again"


@pytest.mark.parametrize("node", [Timings(node0_away=0.2, node0_pause=0.1)], ids=["soon"], indirect=True)
def test_half_of_it_is_never_used(node):
    """Node 0 is not back in time: nothing is left, and the next that asks gets all."""
    dying = Dying(node, (0.5,), comes_back=False)
    with pytest.raises(errors.AdapterSourceError, match=r"node 0 did not send its files within .* asked for again"):
        node.fetch(dying.at_piece)
    assert dying.deaths == 1 and left(node.cache) == []
    node.serve()
    node.fetches_within(DEFAULTS)
    assert is_right(node.fetch(), node)


def test_files_that_changed_on_node_0_are_refused(node, tiny_adapters):
    shutil.rmtree(node.adapter)
    shutil.copytree(tiny_adapters["down"], node.adapter)
    with pytest.raises(errors.AdapterSourceError, match="changed since it was registered"):
        node.fetch()
    shutil.rmtree(node.adapter)
    with pytest.raises(errors.AdapterSourceError, match="cannot be read any more"):
        node.fetch()
    node.controller.adapters.sync.sends = False
    with pytest.raises(errors.UnknownAdapterError, match="no files of it to send"):
        node.fetch()
    assert left(node.cache) == []


@pytest.mark.parametrize("method", ["Files", "Read"])
def test_only_a_registered_shard_gets_files(node, method):
    def ask(error=None, shard=0, instance=node.instance, version=node.record.version, name=WEIGHTS):
        stub = rpc.ShardsStub(channel)
        if method == "Read":
            request = signed_by_shard(pb.ReadRequest(version=version, name=name), shard, instance)
            got = stub.Read(request, timeout=HANG_SECONDS)
        else:  # as an iterator, so that both end in one way
            request = signed_by_shard(pb.FilesRequest(version=version), shard, instance)
            got = (stub.Files(one, timeout=HANG_SECONDS) for one in [request])
        return list(got) if error is None else refused(got, error)

    with open_channel(node.address) as channel:
        assert ask()
        for instance in ("", "1", node.instance[:-1]):
            assert "not of the registered process" in ask(errors.PermissionDeniedError, instance=instance)
        assert "shard 1 is not registered" in ask(errors.ServerUnavailableError, shard=1)
        ask(errors.UnknownAdapterError, version="0" * 64)
        if method == "Read":
            for name in ("", "..", "../law/adapter_config.json", "README.md", "/etc/passwd"):
                assert "expected one of" in ask(errors.AdapterSourceError, name=name)
        node.shard.close()
        node.controller.arrivals.depart(node.shard.handle)
        assert "not registered" in ask(errors.ServerUnavailableError)


def test_transfers_that_stand_still_hold_no_client_up(node):
    """As many as may be wait for their shards, and one for them: heartbeats are answered, another is refused."""
    node.files = partial(FilesService, most_waiting=1)
    node.die()
    node.serve()
    os.truncate(node.adapter / WEIGHTS, 256 << 20)  # sparse; more than a connection takes that nobody reads
    sender = node.control.files
    with ExitStack() as stack, open_channel(node.address) as channel:
        channels = [stack.enter_context(open_channel(node.address, apart=True)) for _ in range(sending.MOST_AT_ONCE)]
        transfers = [node.read(one) for one in channels]
        assert all(next(one).data for one in transfers)
        waiting = node.read(stack.enter_context(open_channel(node.address, apart=True)))
        until(lambda: sender.under_way == sending.MOST_AT_ONCE + 1, "one waits", HANG_SECONDS)
        assert answers_heartbeats(node, channel)
        refused(node.read(channel), errors.ServerBusyError)
        assert sender.under_way == sending.MOST_AT_ONCE + 1, "all stand still yet"
        transfers[0].cancel()
        assert next(waiting).data
        for one in (*transfers, waiting):
            one.cancel()
        until(lambda: sender.under_way == 0, "all ended", HANG_SECONDS)


@pytest.mark.parametrize("node", [Timings(file_piece=0.2)], ids=["soon"], indirect=True)
def test_who_takes_nothing_loses_its_place(node):
    os.truncate(node.adapter / WEIGHTS, 256 << 20)
    with open_channel(node.address) as channel:
        stopped = node.read(channel)
        until(lambda: node.control.files.under_way == 1, "it is sent", HANG_SECONDS)
        until(lambda: node.control.files.under_way == 0, "it ended", HANG_SECONDS)
        assert "took no piece" in refused(stopped, errors.ServerUnavailableError)


def test_a_stalled_disk_delays_no_client(node):
    """A pipe that nobody writes to, in a file's place."""
    pipe = node.adapter / WEIGHTS
    pipe.unlink()
    os.mkfifo(pipe)
    with open_channel(node.address) as channel:
        reading = node.read(channel)
        until(lambda: node.control.files.under_way == 1, "it is read", HANG_SECONDS)
        assert answers_heartbeats(node, channel)
        opened = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_WRONLY)))
        opened.start()
        refused(reading, errors.AdapterSourceError)
        opened.join(HANG_SECONDS)
