"""Events over TCP: which keys may connect, what a tenant sees, and what a peer that means harm can do."""

import contextlib
import socket
import time

import pytest
import zmq
from structlog.testing import capture_logs
from zmq.utils import z85

from lora_server.access.identity import Identity, Role
from lora_server.access.names import Names
from lora_server.address import Address
from lora_server.control.events.keys import ReaderKeys
from lora_server.control.events.log import EventLog
from lora_server.control.events.publisher import EventPublisher
from lora_server.control.events.sockets import MOST_BYTES, InboundLimit, TcpEvents
from lora_server.control.rpc.events import EventsService
from lora_server.errors import ConfigError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.events import ADAPTER, AdapterRemoved, decode
from tests.support.followed_events import Publishing, taken
from tests.support.serving import HANG_SECONDS, until

OPERATOR, ACME, RIVAL = (Identity(tenant, Role.ENGINE, f"of {tenant}") for tenant in ("", "acme", "rival"))
SILENT_SECONDS = 1.0  # heartbeats come every 0.1 s


class Served:
    """A publisher over TCP, without gRPC; `service` answers as the RPCs do."""

    def __init__(self, stack):
        self.stack, self.log, self.keys = stack, EventLog(), ReaderKeys()
        self.log.viewers = Names(frozenset({"acme", "rival"})).viewers
        self.socket = TcpEvents(Address("127.0.0.1", 0), self.keys, self.log.introduce, held=False)
        self.publisher = EventPublisher(self.log, self.socket, timings=Timings(event_beat=0.1))
        stack.callback(self.publisher.close)
        self.service = EventsService(self.log, self.socket.endpoint, self.keys)
        self.address = ("127.0.0.1", int(self.socket.endpoint.rpartition(":")[2]))
        self.shown = {}  # the public keys of peers
        self.context = stack.enter_context(zmq.Context())

    def peer(self, kind=zmq.SUB, who=None, server_key=None, prefixes=(b"",)):
        """A socket with a key that `who` showed; with one that the server does not know if there is none."""
        public, secret = zmq.curve_keypair()
        opened = self.service.Open(pb.OpenEventsRequest(reader_key=z85.decode(public)), who) if who else None
        peer = self.stack.enter_context(self.context.socket(kind))
        peer.set(zmq.CURVE_SERVERKEY, server_key or (opened.server_key if opened else self.keys.public))
        peer.set(zmq.CURVE_PUBLICKEY, public)
        peer.set(zmq.CURVE_SECRETKEY, secret)
        peer.set(zmq.LINGER, 0)
        for prefix in prefixes if kind == zmq.SUB else ():
            peer.subscribe(prefix)
        peer.connect(self.socket.endpoint)
        self.shown[peer] = z85.decode(public)
        return peer

    def events(self, *names):
        for name in names:
            self.log.publish(ADAPTER, name, AdapterRemoved(name, "v"))


@pytest.fixture
def served(stack):
    return Served(stack)


def hears(peer, seconds=HANG_SECONDS):
    """Whether a message comes."""
    return bool(peer.poll(seconds * 1e3))


def topics(peer, seconds):
    """What comes in this time: topics, and names of adapters."""
    found, names, until = set(), set(), time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if peer.poll(left * 1e3):
            topic, _, payload = peer.recv_multipart()
            found.add(topic.decode())
            names |= {event.name for event in decode(payload).events}
    return found, names


def test_a_reader_with_a_key_that_grpc_admitted_has_events(served):
    assert hears(served.peer(who=OPERATOR))


def test_no_other_peer_connects(served):
    stranger = served.peer()
    impostor = served.peer(who=OPERATOR, server_key=z85.decode(zmq.curve_keypair()[0]))
    plain = served.stack.enter_context(served.context.socket(zmq.SUB))
    plain.subscribe(b"")
    plain.connect(served.socket.endpoint)
    assert hears(served.peer(who=OPERATOR))
    assert not any(hears(peer, SILENT_SECONDS) for peer in (stranger, impostor, plain))


@pytest.mark.parametrize("prefix", [b"", b"adapter/", b"adapter/rival/", b"adapter/acme/"])
def test_a_tenant_sees_its_own_topics_whatever_it_subscribes_to(served, prefix):
    acme, operator = served.peer(who=ACME, prefixes=(prefix,)), served.peer(who=OPERATOR)
    sentinel = served.peer(who=ACME)
    assert hears(sentinel) and hears(operator)
    served.events("law", "acme/own", "rival/secret")
    seen, names = topics(acme, SILENT_SECONDS)
    assert not {topic for topic in seen if "rival" in topic or topic in ("admission//", "advice//")}
    expected = {"": {"law", "acme/own"}, "adapter/": {"law", "acme/own"}, "adapter/acme/": {"acme/own"}}
    assert names == expected.get(prefix.decode(), set())
    assert topics(operator, SILENT_SECONDS)[1] == {"law", "acme/own", "rival/secret"}


def test_a_reader_whose_token_is_revoked_is_cut_off_and_the_others_go_on(served):
    acme, rival = served.peer(who=ACME), served.peer(who=RIVAL)
    assert hears(acme) and hears(rival)
    served.keys.void_where(lambda who: who == ACME)

    def is_cut_off():
        topics(acme, 0.05)
        return not hears(acme, SILENT_SECONDS)

    until(is_cut_off, "its connection ended")
    topics(rival, 0.05)
    assert hears(rival), "it connected again by itself"


def test_a_reader_that_goes_takes_nothing_with_it(served):
    stays, goes = served.peer(who=RIVAL), served.peer(who=ACME)
    assert hears(goes)
    goes.close()
    topics(stays, SILENT_SECONDS)
    with capture_logs() as logs:
        assert hears(stays) and still_serves(served)
    assert not logs


def test_a_key_of_another_length_is_refused(served):
    with pytest.raises(ConfigError, match="reader_key: got 3 bytes, expected 32"):
        served.service.Open(pb.OpenEventsRequest(reader_key=b"abc"), OPERATOR)


def test_a_token_has_a_bounded_number_of_keys(monkeypatch):
    monkeypatch.setattr("lora_server.control.events.keys.MOST_OF_A_TOKEN", 2)
    keys = ReaderKeys()
    shown = [bytes([number]) * 32 for number in range(4)]
    keys.admit(shown[0], RIVAL)
    for key in shown[1:]:
        keys.admit(key, ACME)
    assert [keys.reader(key) for key in shown] == [RIVAL, None, ACME, ACME]


# -- peers that mean harm; a publisher that aborts takes this process with it


def still_serves(served):
    served.events("law")
    return hears(served.peer(who=OPERATOR))


def test_messages_that_are_no_subscriptions_void_the_key(served):
    """Without that, libzmq would give the next reader's subscription to another: the operator's to a tenant."""
    operator, acme = served.peer(who=OPERATOR), served.peer(zmq.XSUB, who=ACME)
    assert hears(operator)
    acme.send(b"\1adapter/acme/")
    assert hears(acme)
    for message in (b"\2what?", b"", b"hello"):
        acme.send(message)
    others = [served.peer(who=OPERATOR) for _ in range(5)]
    for _ in range(20):
        acme.send(b"\1adapter/rival/")
    until(lambda: served.keys.reader(served.shown[acme]) is None, "its key is void")
    assert all(hears(other) for other in others)
    served.events("rival/secret")
    assert "rival/secret" not in topics(acme, SILENT_SECONDS)[1]


def test_a_long_message_ends_its_connection_alone(served):
    acme, rival = served.peer(zmq.XSUB, who=ACME), served.peer(who=RIVAL)
    assert hears(rival)
    acme.send(b"\1" + b"x" * 100_000)
    assert hears(rival) and still_serves(served)


def test_a_connection_that_sends_too_much_ends(monkeypatch, stack):
    """A message without an end stays in libzmq's memory, invisible to us: the bytes that came tell."""
    monkeypatch.setattr("lora_server.control.events.sockets.MOST_CONNECTIONS", 2)
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def connected():
        client = stack.enter_context(socket.create_connection(listening.getsockname(), HANG_SECONDS))
        return client, stack.enter_context(listening.accept()[0])

    limit, (_, calm), (loud, heard) = InboundLimit(listening.getsockname()[1]), connected(), connected()
    for _ in range(MOST_BYTES // 1024):
        loud.sendall(b"x" * 1024)
        assert len(heard.recv(1024, socket.MSG_WAITALL)) == 1024
    limit.enforce()
    assert is_open(heard), "it is at the limit"
    loud.sendall(b"x")
    assert heard.recv(1) == b"x"
    limit.enforce()
    assert not is_open(heard) and is_open(calm)
    heard.close()
    _, newer = connected()
    _, newest = connected()
    limit.enforce()
    assert not is_open(calm) and is_open(newer) and is_open(newest), "the oldest ends"


def is_open(connection):
    """Whether a connection was not shut down."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    finally:
        connection.setblocking(True)


def test_a_message_without_an_end_holds_up_no_reader_over_ipc(tmp_path, stack):
    """Over ipc only processes of this user can send one."""
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    ready = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3SUB"
    publishing = Publishing(tmp_path, stack)
    stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
    stranger.settimeout(HANG_SECONDS)
    stranger.connect(publishing.endpoint.removeprefix("ipc://"))
    for message in (greeting, ready):
        assert stranger.recv(1000)
        stranger.sendall(message)
    for _ in range(10_000):
        stranger.sendall(b"\3\0\0\0\0\0\0\3\xe8" + b"\2" * 1000)
    reader = publishing.reader("adapter")
    publishing.events.publish(ADAPTER, "law", AdapterRemoved("law", "v"))
    assert [event.name for event in taken(reader, 1)] == ["law"]


def test_router_identities_and_other_kinds_of_socket_do_no_harm(served):
    """Two peers with one identity aborted libzmq's ROUTER; here is none to have them."""
    for kind in (zmq.DEALER, zmq.REQ, zmq.ROUTER, zmq.PUB, zmq.PULL):
        for _ in range(2):
            peer = served.peer(kind, who=ACME)
            with contextlib.suppress(zmq.ZMQError):
                peer.set(zmq.ROUTING_ID, b"same")
            with contextlib.suppress(zmq.ZMQError):
                peer.send(b"x", zmq.NOBLOCK)
    assert still_serves(served)


CURVE = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\0" * 900


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, CURVE])
def test_bytes_that_are_no_zmtp_do_no_harm(served, data):
    with socket.create_connection(served.address, HANG_SECONDS) as stranger:
        stranger.sendall(data)
        assert still_serves(served)
