"""Floods and garbage at the control plane's port: clients with a lease see nothing of them."""

import asyncio
import contextlib
import gc
import os
import random
import threading
from unittest.mock import Mock

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from lora_server.control.rpc.listener import Threads
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.errors import AdmissionError, ConfigError, LeaseError, LoraServerError, ProtocolError, ServerBusyError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel, translate
from tests.support.controllers import ToldShard, make_controller, registration
from tests.support.serving import HANG_SECONDS, until

SECRET = "that of this run"
HEARTBEAT, REGISTER = "/lora_server.v1.Clients/Heartbeat", "/lora_server.v1.Shards/Register"


@contextlib.contextmanager
def serving(timings=DEFAULTS, **options):
    """A controller without shards, and its gRPC server."""
    controller = make_controller(timings=timings)
    control = ControlServer(controller, "127.0.0.1:0", Doorkeeper(SECRET), **options)
    try:
        yield control, controller, f"127.0.0.1:{control.port}"
    finally:
        control.close(1.0)


@pytest.fixture
def server():
    with serving() as found:
        yield found


def proven(lease):
    return pb.Proof(**lease.proof._asdict())


def beat(controller, address, channel, lease=None):
    request = pb.HeartbeatRequest(proof=proven(lease or controller.clients.leases.grant("engine")))
    return call(rpc.ClientsStub(channel).Heartbeat, request, server=address, seconds=HANG_SECONDS)


@contextlib.contextmanager
def silent(address, path, calls, channels):
    """Calls that never send their message."""
    ended = threading.Event()

    def nothing():
        ended.wait()
        yield from ()

    with contextlib.ExitStack() as stack:
        own = (("grpc.use_local_subchannel_pool", 1),)  # else they would share one connection
        opened = [stack.enter_context(grpc.insecure_channel(address, own)) for _ in range(channels)]
        stack.callback(ended.set)
        begun = [opened[index % channels].stream_stream(path)(nothing()) for index in range(calls)]
        yield begun  # which would be cancelled where nobody keeps it


@pytest.mark.parametrize("path", [HEARTBEAT, REGISTER])
def test_silent_calls_hold_nobody_up_and_end(server, path):
    _, controller, address = server
    with open_channel(address) as channel, silent(address, path, 300, 4):
        assert not beat(controller, address, channel).forgot
    with serving(Timings(first_message=0.1)) as (_, _, address), silent(address, path, 3, 1) as begun:
        for one in begun:
            with pytest.raises(grpc.RpcError) as ended:
                next(one)
            error = translate(ended.value, address)
            assert isinstance(error, ProtocolError) and "no message within" in str(error)


def test_as_many_silent_calls_as_may_be():
    with serving(max_silent_calls=5) as (control, controller, address), open_channel(address) as channel:
        with silent(address, REGISTER, 5, 1):
            until(lambda: sum(control._listener._silent.values()) == 5, "all are there")
            with silent(address, REGISTER, 1, 1) as (refused,), pytest.raises(grpc.RpcError) as ended:
                next(refused)
            assert isinstance(translate(ended.value, address), ServerBusyError)
            with pytest.raises(ServerBusyError, match="silent"):  # of the same host: one's own fault
                beat(controller, address, channel)
        until(lambda: not control._listener._silent, "they went")
        assert not beat(controller, address, channel).forgot


class StoppedShard(ToldShard):
    """It hears its controller, and answers when `go` is set."""

    def _run(self):
        self.go.wait()
        super()._run()


def test_bystanders_keep_their_leases_beside_adds_and_joins_without_number(server, tmp_path):
    """While a shard is stopped, so that what was begun cannot end: heartbeats are answered all the same."""
    _, controller, address = server
    StoppedShard.go, dice = threading.Event(), random.Random(20261122)
    shard = StoppedShard(controller)
    leases = [controller.clients.leases.grant(f"engine {number}") for number in range(10)]
    kinds = ["add"] * 150 + ["join"] * 50
    dice.shuffle(kinds)
    with open_channel(address) as channel, contextlib.ExitStack() as stack:
        own = (("grpc.use_local_subchannel_pool", 1),)
        flood = [stack.enter_context(grpc.insecure_channel(address, own)) for _ in range(4)]
        calls = []
        for number, kind in enumerate(kinds):
            if kind == "add":
                request = pb.AddAdapterRequest(name=f"a{number}", uri=str(tmp_path / "none"), wait_seconds=HANG_SECONDS)
                method = rpc.AdaptersStub(flood[number % 4]).Add
            else:
                request, method = pb.JoinRequest(instance="flood"), rpc.ClientsStub(flood[number % 4]).Join
            calls.append(method.future(request, timeout=HANG_SECONDS))
        for lease in leases * 3:
            assert not beat(controller, address, channel, lease).forgot
        assert not all(one.done() for one in calls), "all that was beside the flood"
        shard.go.set()
        for one in calls:
            error = one.exception(HANG_SECONDS)
            assert error is None or isinstance(translate(error, address), LoraServerError)
        assert all(controller.clients.leases.proven(lease.proof) is lease for lease in leases)
    shard.close()


def test_what_does_not_parse_is_refused_and_leaves_nothing(server):
    _, _, address = server
    garbage = b"\x0a" + b"\xff" * 4000
    with open_channel(address) as channel:
        method, process = channel.unary_unary(HEARTBEAT), psutil.Process(os.getpid())

        def send(count):
            for _ in range(count):
                with pytest.raises(ProtocolError, match="HeartbeatRequest"):
                    call(method, garbage, server=address, seconds=HANG_SECONDS)
            gc.collect()
            return process.memory_info().rss

        before = send(200)
        assert send(1000) - before < 8 << 20  # 16 KB each would be twice that
        with pytest.raises(grpc.RpcError) as ended:
            next(channel.stream_stream(HEARTBEAT)(iter(())))  # no message at all
    assert isinstance(translate(ended.value, address), ProtocolError)


def test_health_answers_probes(server):
    control, _, address = server
    answers = health_pb2.HealthCheckResponse
    with open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for ready, answer in ((False, answers.NOT_SERVING), (True, answers.SERVING)):
            control.set_ready(ready)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_SECONDS).status == answer
        unknown = health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=HANG_SECONDS)
        assert unknown.status == answers.SERVICE_UNKNOWN


def test_reflection_is_off_unless_a_flag_turns_it_on():
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for reflection, code in ((False, grpc.StatusCode.UNIMPLEMENTED), (True, grpc.StatusCode.OK)):
        with serving(reflection=reflection) as (_, _, address), open_channel(address) as channel:
            assert channel.stream_stream(path)(iter(())).code() is code


def test_calls_of_a_kind_are_bounded():
    async def flood():
        threads, go = Threads("kind", 1, 1), threading.Event()
        running = [asyncio.ensure_future(threads.run(go.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServerBusyError, match="2 calls of this kind"):
            await threads.run(go.wait)
        running.pop().cancel()  # its client gave up, and it waits for its thread all the same
        go.set()
        assert await running.pop()
        while threads._here:
            await asyncio.sleep(0.01)
        assert await threads.run(go.wait)
        threads.close()

    asyncio.run(asyncio.wait_for(flood(), HANG_SECONDS))


def test_a_server_that_hears_no_heartbeats_knows_it(server):
    control, controller, address = server
    go = threading.Event()
    assert control.stalled() == 0.0
    slow = [control._listener.run(control._leases.run(go.wait)) for _ in range(8)]
    until(lambda: control.stalled() > 0.05, "heartbeats have no thread", HANG_SECONDS)
    go.set()
    assert all(one.result(HANG_SECONDS) for one in slow)
    until(lambda: control.stalled() == 0.0, "they have", HANG_SECONDS)
    with open_channel(address) as channel:
        assert not beat(controller, address, channel).forgot


def test_a_lease_is_spoken_for_only_by_its_holder(server):
    """Ids and epochs count up: whoever has a lease of its own can guess the others'."""
    _, controller, address = server
    victim = controller.clients.leases.grant("victim")
    mine = controller.clients.leases.grant("me")
    forged = pb.Proof(client=victim.client, epoch=victim.epoch, key=mine.key)
    with open_channel(address) as channel:
        clients = rpc.ClientsStub(channel)
        calls = [
            (clients.Heartbeat, pb.HeartbeatRequest(proof=forged, settled=[1])),
            (clients.Acquire, pb.AcquireRequest(proof=forged, names=["a"])),
            (clients.Await, pb.AwaitRequest(proof=forged, tickets=[1])),
            (clients.Cancel, pb.CancelRequest(proof=forged, tickets=[1])),
            (clients.Release, pb.ReleaseRequest(proof=forged, handles=[1])),
            (clients.Prefetch, pb.PrefetchRequest(proof=forged)),
            (clients.Restore, pb.RestoreRequest(proof=forged)),
            (clients.World, pb.WorldRequest(proof=forged)),
            (clients.Borrow, pb.BorrowRequest(proof=forged, holder=forged)),
            (clients.Borrow, pb.BorrowRequest(proof=proven(mine), holder=forged)),
        ]
        assert len(calls) + 1 == len(pb.DESCRIPTOR.services_by_name["Clients"].methods), "all but Join and Leave"
        for method, request in calls:
            with pytest.raises(LeaseError):
                call(method, request, server=address, seconds=HANG_SECONDS)
        call(clients.Leave, pb.LeaveRequest(proof=forged), server=address, seconds=HANG_SECONDS)
    assert controller.clients.leases.proven(victim.proof) is victim


def test_what_one_call_asks_for_is_bounded(server):
    _, controller, address = server
    lease = controller.clients.leases.grant("engine")
    request = pb.AcquireRequest(proof=proven(lease), names=["a"] * 400_000)
    with open_channel(address) as channel, pytest.raises(AdmissionError, match="400000 adapters in one call"):
        call(rpc.ClientsStub(channel).Acquire, request, server=address, seconds=HANG_SECONDS)


def register(address, channel, one):
    """Its first command, or the error that it is turned away with."""
    commands = rpc.ShardsStub(channel).Register(iter([pb.ShardReport(registration=one)]), timeout=HANG_SECONDS)
    try:
        return next(commands)
    except grpc.RpcError as error:
        return translate(error, address)


def test_an_outsider_is_no_shard(server):
    """It knows all that Join tells, so also what shards agree on."""
    _, controller, address = server
    digest = controller.agreement.digest()
    with open_channel(address) as channel:
        for secret in ("", "another"):
            refused = register(address, channel, registration(0, agreement=digest, secret=secret))
            assert isinstance(refused, ConfigError) and "join-token-file" in str(refused)
            assert not controller.shards.live()
        assert register(address, channel, registration(0, agreement=digest, secret=SECRET)).HasField("claim")


def test_nodes_are_believed_where_there_is_no_token():
    Doorkeeper("x", True).check(pb.Registration(shard=1, node=1))
    Doorkeeper("x").check(pb.Registration(shard=1, node=1, secret="x"))
    for believes, node, secret in ((True, 0, ""), (True, 1, "y"), (False, 1, "")):
        with pytest.raises(ConfigError):
            Doorkeeper("x", believes).check(pb.Registration(shard=1, node=node, secret=secret))


def test_what_fails_inside_is_an_error_of_ours(server, monkeypatch):
    _, controller, address = server

    monkeypatch.setattr(controller.adapters, "get", Mock(side_effect=RuntimeError("unexpected")))
    with open_channel(address) as channel, capture_logs() as lines, pytest.raises(LoraServerError) as failed:
        call(rpc.AdaptersStub(channel).Get, pb.GetAdapterRequest(name="x"), server=address, seconds=HANG_SECONDS)
    assert "the server failed: RuntimeError('unexpected')" in str(failed.value)
    assert lines[0]["event"] == "a call failed, and should not have"  # then that it was refused, once it was
