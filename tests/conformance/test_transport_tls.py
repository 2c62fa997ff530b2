"""TLS between engines and shards, and between the shards of a stage: who listens, poses or stalls gets nowhere."""

import contextlib
import socket
import time

import pytest

from lora_server.access.tls import shard_certificate
from lora_server.errors import ShardUnavailableError, StepTimeoutError
from lora_server.shard.orders import OrderReceiver, OrderSender
from lora_server.timings import Timings
from lora_server.transport.address import parse, readable
from lora_server.transport.base import Grant
from lora_server.transport.frames import HEADER, STEP
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tls import connect
from lora_server.wire.messages import Hello, Order, badge_of
from tests.support.clocks import VirtualClock
from tests.support.echo import echo_shard
from tests.support.echo_client import LAYOUT, SECONDS, SHARD
from tests.support.relay import Relay
from tests.support.serving import until

BADGE, HELLO = b"badge" * 8, Hello(1, 1, b"key")


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def shard(tmp_path, clock):
    with echo_shard("tls", tmp_path, clock=clock) as found:
        yield found


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_wait_that_ended_in_the_middle_of_an_answer_goes_on(kind, tmp_path):
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(echo_shard(kind, tmp_path))
        relay = stack.enter_context(Relay(shard.listener.address))
        client = shard.client(1, at=relay.address)
        client.step()
        relay.flows.clear()
        seq = client.push(LAYOUT.response_bytes)
        assert relay.held.wait(SECONDS)
        with pytest.raises(StepTimeoutError):
            client.link.wait(seq, time.monotonic() + 0.05)
        client.link.check()
        relay.flows.set()
        client.check(seq)
        client.step()
        client.link.close()


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_relay_between_engine_and_shard_hears_no_row(kind, tmp_path):
    """Without TLS it hears all of them: the relay does listen."""
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(echo_shard(kind, tmp_path))
        relay = stack.enter_context(Relay(shard.listener.address))
        client = shard.client(1, at=relay.address)
        assert (client.link.transport, shard.port.connections[0].transport) == (kind, kind)
        said = []
        for _ in range(5):
            seq = client.push(LAYOUT.response_bytes)
            said += [client.sent[seq], client.sent[seq][::-1]]
            client.check(seq)
        client.link.close()
    parts = [one[at : at + 16] for one in said for at in range(0, len(one) - 16, 512)]
    assert {part in relay.heard for part in parts} == {kind == "tcp"}
    assert len(relay.heard) > sum(map(len, said))


@pytest.mark.parametrize("who", ["client", "server"])
def test_what_is_changed_on_its_way_is_not_taken(who, shard):
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(Relay(shard.listener.address))
        client = shard.client(1, at=relay.address)
        client.step()
        (connection,) = shard.port.connections
        relay.spoils = who
        seq = client.push()
        with pytest.raises(ShardUnavailableError):
            client.link.wait(seq, time.monotonic() + SECONDS)
        client.link.close()
        until(lambda: shard.gone == [(1, 1)], "the shard to let it go")
        assert connection.served == (1 if who == "client" else 2)


def test_a_peer_with_another_certificate_is_no_shard(shard):
    """Whatever may be behind it: nothing can be in the middle."""
    told = shard_certificate(SHARD).der
    shard.port.grant(Grant(1, 1, b"key"))
    address = shard.listener.address
    with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} at {address}: .*its certificate differs"):
        TcpLink(address, HELLO, SHARD, SECONDS, told)
    assert shard.port.connections == ()
    shard.link(1)


def test_neither_side_falls_back_to_the_clear(shard, tmp_path):
    """Neither an engine that was told to expect TLS, nor a shard that has it."""
    shard.port.grant(Grant(1, 1, b"key"))
    with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} at tcp://.*: the shard is silent.*TLS"):
        TcpLink(shard.listener.address, HELLO, SHARD, 0.3)
    with echo_shard("tcp", tmp_path) as clear:
        clear.port.grant(Grant(1, 1, b"key"))
        with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} at tcp://.*: .*speaks no TLS"):
            TcpLink(clear.listener.address, HELLO, SHARD, SECONDS, shard.der)
        assert clear.port.connections == ()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(STEP, 4, 1) + b"xxxx"])
def test_a_peer_that_shakes_hands_and_proves_nothing_ends(shard, said, clock):
    sock = socket.create_connection(parse(shard.listener.address), SECONDS)
    sock.setblocking(False)
    with contextlib.closing(connect(sock, shard.der, lambda stream: readable(stream, SECONDS))) as stranger:
        if said:
            stranger.sendmsg([said])
        else:
            clock.advance(Timings.handshake + 1)
        heard, ended = b"", False
        with contextlib.suppress(ConnectionResetError):
            while not ended and readable(stranger, SECONDS):
                with contextlib.suppress(BlockingIOError):
                    more = stranger.recv(4096)
                    heard, ended = heard + more, not more
    assert len(heard) <= HEADER.size + 64, "a challenge, and no more"
    shard.client(1).step()


def test_an_engine_waits_for_no_handshake_longer_than_it_said():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, began = f"tcp://127.0.0.1:{silent.getsockname()[1]}", time.monotonic()
        with pytest.raises(ShardUnavailableError, match=f"shard {SHARD} at {address}: the shard is silent"):
            TcpLink(address, HELLO, SHARD, 0.2, shard_certificate(SHARD).der)
        assert 0.2 <= time.monotonic() - began < 30


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_look_at_a_link_takes_nothing_of_an_answer(kind, tmp_path):
    with echo_shard(kind, tmp_path) as shard:
        client = shard.client(1)
        client.link.check()
        seq = client.push()
        assert readable(client.link._socket, SECONDS)
        client.link.check(), client.link.check()
        client.check(seq)
        shard.port.revoke(1)
        with pytest.raises(ShardUnavailableError):
            until(lambda: client.link.check(), "a look to see the shard's goodbye")


def test_orders_are_encrypted_and_come_from_the_certificate_s_owner_alone():
    certificate = shard_certificate(0)
    heard = {"told": [], "clear": [], "other": []}
    with contextlib.ExitStack() as stack:
        leader = OrderSender(BADGE, "127.0.0.1", certificate=certificate)
        stack.callback(leader.close)
        relay = stack.enter_context(Relay(leader.address))
        known = {"told": certificate.der, "clear": b"", "other": shard_certificate(0).der}
        for name, told in known.items():
            address = relay.address if name == "told" else leader.address
            stack.callback(OrderReceiver(address, 1, badge_of(BADGE, 1), heard[name].append, told).close)
        until(lambda: leader.followers == 1, "the one that was told is let in")
        order = Order(7, 1, 3, 60_000_000)
        leader.send(order)
        until(lambda: heard["told"], "it hears the order")
        assert leader.followers == 1
    assert heard == {"told": [order], "clear": [], "other": []}
    assert b"order" not in relay.heard and b"challenge" not in relay.heard
