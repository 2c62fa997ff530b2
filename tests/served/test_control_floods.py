"""Floods and garbage at the control plane's port: clients with a lease see nothing of them."""

import asyncio
import contextlib
import gc
import math
import os
import queue
import random
import socket
import threading
from unittest.mock import Mock

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from lora_server.access.gate import Gate
from lora_server.control.admission.table import MAX_TICKETS
from lora_server.control.rpc.listener import Threads
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.errors import (
    AdapterSourceError,
    AdmissionError,
    ConfigError,
    LeaseError,
    LoraServerError,
    ProtocolError,
    ServerBusyError,
    ServerUnavailableError,
    UnknownAdapterError,
)
from lora_server.registry.database import FILE, Database
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import bounds, messages
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.messages import proves
from lora_server.wire.rpc import call, open_channel, translate
from tests.support.controllers import ToldShard, make_controller, registration
from tests.support.far import far_server, fetcher_of
from tests.support.serving import HANG_SECONDS, has_ended, until
from tests.support.shard_stream import shard_of
from tests.support.signed import borrow, signed

SECRET = "that of this run"
HEARTBEAT, REGISTER = "/lora_server.v1.Clients/Heartbeat", "/lora_server.v1.Shards/Register"
HEALTH = "/grpc.health.v1.Health/Check"
LOST = {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.IDLE}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and no settings


@contextlib.contextmanager
def serving(timings=DEFAULTS, fetcher=None, **options):
    """A controller without shards, and its gRPC server."""
    controller = make_controller(timings=timings, fetcher=fetcher)
    control = ControlServer(controller, "127.0.0.1:0", Doorkeeper(SECRET), **options)
    try:
        yield control, controller, f"127.0.0.1:{control.port}"
    finally:
        control.close(1.0)


@pytest.fixture
def server():
    with serving() as found:
        yield found


def beat(controller, address, channel, lease=None):
    lease = lease or controller.clients.leases.grant("engine")
    request = signed(pb.HeartbeatRequest(), lease.proof)
    return call(rpc.ClientsStub(channel).Heartbeat, request, server=address, seconds=HANG_SECONDS)


def refusal(call, address):
    """The error with which a call ends that has no answer."""
    with pytest.raises(grpc.RpcError) as ended:
        next(call)
    return translate(ended.value, address)


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
        for error in [refusal(one, address) for one in begun]:
            assert isinstance(error, ProtocolError) and "no message within" in str(error)


def test_an_empty_first_message_is_refused(server):
    """It says no more than silence, and would be waited behind."""
    _, _, address = server
    with open_channel(address) as channel:
        sent = queue.SimpleQueue()
        sent.put(pb.ShardReports())
        register = channel.stream_stream(REGISTER, pb.ShardReports.SerializeToString)
        error = refusal(register(iter(sent.get, None)), address)
        sent.put(None)
    assert isinstance(error, ProtocolError) and "expected a ShardHello" in str(error)


def busy_ones(calls):
    """How many of these ended, each since too many were silent."""
    ended = [one for one in calls if one.done()]
    assert all(isinstance(translate(one, "x"), ServerBusyError) for one in ended)
    return len(ended)


@pytest.mark.parametrize("channels", [1, 5])
def test_silent_calls_refuse_no_call_of_others(channels):
    """Neither of an engine that is there, nor of one that comes; the oldest silent ones end."""
    with serving(max_silent_calls=20) as (control, controller, address), contextlib.ExitStack() as stack:
        lease = controller.clients.leases.grant("engine")
        there, comes = (stack.enter_context(open_channel(address, apart=True)) for _ in range(2))
        assert not beat(controller, address, there, lease).forgot
        begun = stack.enter_context(silent(address, HEALTH, 60, channels))
        until(lambda: busy_ones(begun) == 40, "as many as may be silent are")
        for channel in (there, comes):
            for _ in range(5):
                assert not beat(controller, address, channel, lease).forgot
        assert len(control._listener._handler.silent) <= 20


def test_a_connection_with_many_silent_calls_ends_none_of_another():
    with serving(max_silent_calls=20) as (control, *_, address), contextlib.ExitStack() as stack:
        (own,) = stack.enter_context(silent(address, HEALTH, 1, 1))
        until(lambda: len(control._listener._handler.silent) == 1, "the first is there")
        begun = stack.enter_context(silent(address, HEALTH, 60, 2))
        until(lambda: busy_ones(begun) == 41, "one more than its own")
        assert not own.done()


@contextlib.contextmanager
def raw(address, count, said=PREFACE):
    """Connections that say no more than this."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection((host, port), HANG_SECONDS)) for _ in range(count)]
        for one in sockets:
            with contextlib.suppress(ConnectionError):
                one.sendall(said)
        yield sockets


def test_idle_connections_of_a_host_are_bounded_and_end_no_engines():
    with serving(max_strangers=8) as (_, controller, address), open_channel(address) as channel:
        lease = controller.clients.leases.grant("engine")
        assert not beat(controller, address, channel, lease).forgot
        states = []
        channel.subscribe(states.append)
        with capture_logs() as lines, raw(address, 60) as sockets:
            until(lambda: sum(map(has_ended, sockets)) >= 52, "the oldest are closed")
            for _ in range(5):
                assert not beat(controller, address, channel, lease).forgot
            assert not LOST & set(states)
        said = [one for one in lines if "too many connections" in one["event"]]
        assert 1 <= len(said) <= 3, "a line for a flood, and one in ten seconds that it goes on"


def test_connections_that_leases_were_granted_on_stay_though_no_token_is_needed():
    """A host may have more engine workers than strangers; each is there from its join on."""
    with serving(max_strangers=8) as (_, controller, address), contextlib.ExitStack() as stack:
        stack.callback(ToldShard(controller).close)
        states = []
        for number in range(20):
            channel = stack.enter_context(open_channel(address, apart=True))
            request = pb.JoinRequest(instance=f"worker {number}")
            call(rpc.ClientsStub(channel).Join, request, server=address, seconds=HANG_SECONDS)
            channel.subscribe(states.append)
        sockets = stack.enter_context(raw(address, 30))
        until(lambda: sum(map(has_ended, sockets)) >= 22, "the oldest strangers are closed")
        assert not LOST & set(states)


@pytest.mark.parametrize("said", [b"", PREFACE[:10]])
def test_a_connection_that_does_not_say_what_it_is_ends_soon(said):
    with serving(Timings(handshake=0.2)) as (*_, address), raw(address, 1, said) as (sock,):
        until(lambda: has_ended(sock), "it is closed", HANG_SECONDS / 2)


def test_a_connection_without_calls_ends():
    states = []
    with serving(Timings(grpc_idle=0.2)) as (_, controller, address), open_channel(address) as channel:
        channel.subscribe(states.append)
        assert not beat(controller, address, channel).forgot
        until(lambda: states[-1:] == [grpc.ChannelConnectivity.IDLE], "the server closed it", HANG_SECONDS / 2)
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


@pytest.fixture
def slow(tmp_path, tiny_adapters):
    """A server with tokens whose operator adds from a source that stops half way, as often as it may at once."""
    with far_server(tmp_path / "far") as far, contextlib.ExitStack() as stack:
        database = Database(f"sqlite:///{tmp_path / FILE}")
        stack.callback(database.close)
        gate, fetcher = Gate(database), fetcher_of(tmp_path / "cache")
        stack.callback(gate.close)
        _, controller, address = stack.enter_context(serving(gate=gate, fetcher=fetcher))
        stack.callback(ToldShard(controller).close)
        url = far.put("law", tiny_adapters["all"])
        far.open.clear()
        stub = rpc.AdaptersStub(stack.enter_context(open_channel(address)))
        requests = [pb.AddAdapterRequest(name=f"a{number}", uri=url, wait_seconds=600.0) for number in range(17)]
        adds = [stub.Add.future(one) for one in requests[:-1]]
        until(lambda: far.got.total() == 16, "16 fetches are under way", HANG_SECONDS)
        adds.append(stub.Add.future(requests[-1]))  # it waits for one of the others
        yield address, adds, fetcher, far


def test_slow_sources_hold_up_no_other_change(slow, tmp_path):
    address, _, _, _ = slow
    with open_channel(address) as channel:
        adapters, access, server = rpc.AdaptersStub(channel), rpc.AccessStub(channel), rpc.ServerStub(channel)

        def change(method, request):
            return call(method, request, server=address, seconds=HANG_SECONDS)

        with pytest.raises(UnknownAdapterError):
            change(adapters.Remove, pb.RemoveAdapterRequest(name="law"))
        with pytest.raises(AdapterSourceError, match="--adapter-root"):
            change(adapters.Add, pb.AddAdapterRequest(name="here", uri=str(tmp_path / "none")))
        with pytest.raises(LoraServerError, match="wait_seconds"):
            change(adapters.Add, pb.AddAdapterRequest(name="never", uri="/", wait_seconds=math.nan))
        with contextlib.suppress(ServerUnavailableError):  # as it has not settled
            change(server.Drain, pb.DrainRequest(seconds=0.0))
        change(access.SetTenant, pb.Tenant(name="acme"))
        change(access.CreateToken, pb.CreateTokenRequest(tenant="", role="admin"))


def test_a_fetch_ends_with_its_caller_and_the_next_begins(slow):
    _, adds, fetcher, far = slow
    for one in adds[:-1]:
        one.cancel()
    until(lambda: fetcher.use().fetch_failures == 16, "all fetches ended", HANG_SECONDS)
    until(lambda: far.got.total() == 17, "the next began", HANG_SECONDS)
    assert not adds[-1].done() and not far.open.is_set()


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
        no_message = refusal(channel.stream_stream(HEARTBEAT)(iter(())), address)
    assert isinstance(no_message, ProtocolError)


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
        runs, waits = (asyncio.ensure_future(threads.run(go.wait)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(ServerBusyError, match="2 calls of this kind"):
            await threads.run(go.wait)
        runs.cancel()  # its client gave up, and its thread works on
        await asyncio.sleep(0)
        with pytest.raises(ServerBusyError):
            await threads.run(go.wait)
        go.set()
        assert await waits
        while not threads.idle:
            await asyncio.sleep(0.01)
        assert await threads.run(go.wait)
        threads.close()

    asyncio.run(asyncio.wait_for(flood(), HANG_SECONDS))


def test_a_waiting_call_whose_caller_gives_up_frees_its_place_at_once():
    """While every thread is stuck: else a caller that asks and gives up keeps all others out."""

    async def flood():
        threads, go, began = Threads("kind", 1, 2), threading.Event(), []
        runs = asyncio.ensure_future(threads.run(go.wait))
        try:
            for number in range(20):
                waits = asyncio.ensure_future(threads.run(began.append, number))
                await asyncio.sleep(0)
                waits.cancel()
                await asyncio.wait([waits])
            last = [asyncio.ensure_future(threads.run(began.append, name)) for name in ("last", "but one")]
            await asyncio.sleep(0)
            assert not any(one.done() for one in (runs, *last)) and began == []
        finally:
            go.set()
        await asyncio.gather(runs, *last)
        assert began == ["last", "but one"]
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
    forged = victim.proof._replace(key=mine.proof.key)
    with open_channel(address) as channel:
        clients = rpc.ClientsStub(channel)
        calls = [
            (clients.Heartbeat, signed(pb.HeartbeatRequest(settled=[1]), forged)),
            (clients.Acquire, signed(pb.AcquireRequest(names=["a"]), forged)),
            (clients.Await, signed(pb.AwaitRequest(tickets=[1]), forged)),
            (clients.Cancel, signed(pb.CancelRequest(tickets=[1]), forged)),
            (clients.Release, signed(pb.ReleaseRequest(handles=[1]), forged)),
            (clients.Hold, signed(pb.HoldRequest(entries=[pb.HoldEntry()]), forged)),
            (clients.Prefetch, signed(pb.PrefetchRequest(), forged)),
            (clients.Restore, signed(pb.RestoreRequest(), forged)),
            (clients.World, signed(pb.WorldRequest(), forged)),
            (clients.Borrow, borrow(forged, mine.proof)),
            (clients.Borrow, borrow(mine.proof, forged)),
        ]
        assert len(calls) + 1 == len(pb.DESCRIPTOR.services_by_name["Clients"].methods), "all but Join and Leave"
        for method, request in calls:
            with pytest.raises(LeaseError):
                call(method, request, server=address, seconds=HANG_SECONDS)
        call(clients.Leave, signed(pb.LeaveRequest(), forged), server=address, seconds=HANG_SECONDS)
    assert controller.clients.leases.proven(victim.proof) is victim


def test_cancelled_tickets_that_never_come_are_bounded(server):
    _, controller, address = server
    proof = controller.clients.leases.grant("engine").proof
    with open_channel(address) as channel, pytest.raises(AdmissionError, match="open requests, as many"):
        for first in range(1, 10 * MAX_TICKETS, MAX_TICKETS):
            request = signed(pb.CancelRequest(tickets=range(first, first + MAX_TICKETS)), proof)
            call(rpc.ClientsStub(channel).Cancel, request, server=address, seconds=HANG_SECONDS)


def test_a_command_that_no_report_could_carry_is_refused_and_breaks_no_stream(server):
    """What a shard keeps goes to the next controller in one report; it has to fit."""
    _, controller, address = server
    sizes = (bounds.KEPT_BYTES, bounds.REQUEST_BYTES - 60, bounds.REQUEST_BYTES, 2 * bounds.REQUEST_BYTES)
    with shard_of(address, controller.agreement.digest(), SECRET) as (stream, told, _):
        until(controller.shards.live, "it has registered")
        handle = controller.shards.live()[0]
        for size in sizes:
            sent = handle.commands.send(pb.ShardCommand(grant=pb.Grant(client=3, epoch=1, instance="x" * size)))
            assert sent.finished.wait(HANG_SECONDS)
            assert isinstance(sent.error, ProtocolError) and "command grant: got" in str(sent.error)
        sent = handle.commands.send(pb.ShardCommand(grant=pb.Grant(client=4, epoch=1)))
        assert sent.finished.wait(HANG_SECONDS) and sent.error is None
        assert [one.grant.client for one in told if one.HasField("grant")] == [4] == [*stream._commands.kept.grants]


@contextlib.contextmanager
def registering(address, channel, secret, node=0, nonce=bytes(32)):
    """(what the controller says of itself, a function that registers with a proof by this secret)."""
    said, hello = queue.SimpleQueue(), pb.ShardHello(shard=0, node=node, nonce=nonce)
    said.put(pb.ShardReports(reports=[pb.ShardReport(hello=hello)]))
    commands = rpc.ShardsStub(channel).Register(iter(said.get, None), timeout=HANG_SECONDS)

    def register(one, *more):
        one.proof = messages.proof(secret.encode(), b"shard", challenge.nonce, nonce)
        said.put(pb.ShardReports(reports=[pb.ShardReport(registration=one), *more]))
        return answer()

    def answer():
        """Its next command, or the error that it is turned away with."""
        try:
            return next(commands).commands[0]
        except grpc.RpcError as error:
            return translate(error, address)

    try:
        challenge = answer()
        challenge = challenge.challenge if isinstance(challenge, pb.ShardCommand) else challenge
        yield challenge, register
    finally:
        said.put(None)


def test_an_outsider_is_no_shard(server):
    """It knows all that Join tells, so also what shards agree on."""
    _, controller, address = server
    one = registration(0, agreement_digest=controller.agreement.digest())
    with open_channel(address) as channel:
        for secret in ("", "another"):
            with registering(address, channel, secret) as (_, register):
                refused = register(one)
            assert isinstance(refused, ConfigError) and "join-token-file" in str(refused)
            assert not controller.shards.live()
        with registering(address, channel, SECRET) as (_, register):
            other = registration(1, agreement_digest=one.agreement_digest)
            assert isinstance(register(other), ConfigError), "of another shard"
        with registering(address, channel, SECRET) as (challenge, register):
            assert proves(challenge.proof, SECRET.encode(), b"controller", bytes(32), challenge.nonce)
            assert register(one).HasField("claim")
        with registering(address, channel, SECRET, nonce=b"short") as (refused, _):
            assert isinstance(refused, ProtocolError)


def test_a_report_that_fails_ends_its_shard_alone(server):
    """One thread applies the reports of all shards."""
    _, controller, address = server
    hear = controller.hear

    def failing(handle, report):
        if report.HasField("leaving"):
            raise ValueError("a defect")
        hear(handle, report)

    controller.hear = failing
    own = registration(0, agreement_digest=controller.agreement.digest())
    with open_channel(address) as channel:
        for said in (pb.ShardReport(leaving=True), pb.ShardReport(stats=pb.ShardStats(device="x"))):
            with registering(address, channel, SECRET) as (_, register):
                assert register(own, said).HasField("claim")
                if said.HasField("stats"):
                    until(lambda: [one.stats.device for one in controller.shards.live().values()] == ["x"], "heard")
                else:
                    until(lambda: not controller.shards.live(), "its stream has ended")


def test_a_shard_that_does_not_register_is_ended():
    with serving(Timings(handshake=0.1)) as (*_, address), open_channel(address) as channel:
        said = queue.SimpleQueue()
        said.put(pb.ShardReports(reports=[pb.ShardReport(hello=pb.ShardHello(nonce=bytes(32)))]))
        commands = rpc.ShardsStub(channel).Register(iter(said.get, None), timeout=HANG_SECONDS)
        assert next(commands).commands[0].HasField("challenge")
        assert "no registration within" in str(refusal(commands, address))
        said.put(None)


def test_a_shard_that_does_not_say_all_that_it_kept_is_ended(server):
    _, controller, address = server
    own = registration(0, agreement_digest=controller.agreement.digest(), kept=2)
    with open_channel(address) as channel, registering(address, channel, SECRET) as (_, register):
        refused = register(own, pb.ShardReport(kept=pb.Kept(grant=pb.Grant(client=1))))
    assert isinstance(refused, ProtocolError)
    assert "shard 0: 1 of 2 reports of what it kept came, and no other within" in str(refused)
    assert not controller.shards.live()


@pytest.mark.parametrize(
    ("believes", "node", "secret", "good"),
    [(True, 1, "", True), (True, 0, "", False), (True, 1, "y", False), (False, 1, "", False)],
)
def test_nodes_are_believed_where_there_is_no_token(believes, node, secret, good):
    door = Doorkeeper("x", believes)
    hello = pb.ShardHello(shard=1, node=node, nonce=bytes(32))
    challenge = door.challenge(hello)
    assert proves(challenge.proof, secret.encode(), b"controller", hello.nonce, challenge.nonce) == good
    own = messages.proof(secret.encode(), b"shard", challenge.nonce, hello.nonce)
    with contextlib.nullcontext() if good else pytest.raises(ConfigError):
        door.check(hello, challenge, pb.Registration(shard=1, node=node, proof=own))


def test_a_call_is_taken_once_and_as_it_was_signed(server):
    """What a process that posed as the controller was told is of no use with the real one."""
    _, controller, address = server
    lease = controller.clients.leases.grant("engine")
    heard = signed(pb.ReleaseRequest(handles=[1]), lease.proof)
    assert lease.proof.key not in heard.SerializeToString()
    other = pb.RestoreRequest(proof=heard.proof, handles=[1])
    changed = pb.ReleaseRequest(proof=heard.proof, handles=[2])
    with open_channel(address) as channel:
        clients = rpc.ClientsStub(channel)
        for method, forged in ((clients.Restore, other), (clients.Release, changed)):
            with pytest.raises(LeaseError):
                call(method, forged, server=address, seconds=HANG_SECONDS)
        call(clients.Release, heard, server=address, seconds=HANG_SECONDS)
        with pytest.raises(LeaseError):
            call(clients.Release, heard, server=address, seconds=HANG_SECONDS)
        assert not beat(controller, address, channel, lease).forgot


def test_what_fails_inside_is_an_error_of_ours(server, monkeypatch):
    _, controller, address = server

    monkeypatch.setattr(controller.adapters.catalog, "get", Mock(side_effect=RuntimeError("unexpected")))
    with open_channel(address) as channel, capture_logs() as lines, pytest.raises(LoraServerError) as failed:
        call(rpc.AdaptersStub(channel).Get, pb.GetAdapterRequest(name="x"), server=address, seconds=HANG_SECONDS)
    assert "the server failed: RuntimeError('unexpected')" in str(failed.value)
    assert lines[0]["event"] == "internal error in a call"  # then that it was refused, once it was
