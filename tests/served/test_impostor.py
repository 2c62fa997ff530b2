"""A process that poses as the controller at its port learns no secret; shards do nothing that it says, and clients that
have a token believe no answer of it."""

import contextlib
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from client_connector.directory import AdapterDirectory
from client_connector.remote import RemoteServer
from lora_server.access import tokens
from lora_server.access.identity import Role
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.daemon.files import Node0
from lora_server.errors import (
    AdapterSourceError,
    ConfigError,
    LeaseError,
    LoraServerError,
    ServerUnavailableError,
    UnauthenticatedError,
    UnknownAdapterError,
)
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire import proofs
from lora_server.wire.credentials import AUTHORIZATION, CODE_KEY, Credentials
from lora_server.wire.proofs import ANSWER_KEY, sign_call
from lora_server.wire.rpc import call, open_channel, status_of
from lora_server.wire.terms import Proof
from tests.support.controllers import make_controller
from tests.support.gated import Gated
from tests.support.serving import HANG_SECONDS, until
from tests.support.shard_stream import shard_of
from tests.support.signed import borrow, signed

SECRET = "that all nodes have"
SOON = Timings(controller_retry=0.02, controller_start=0.0, node0_away=0.2, handshake=2.0)


def _message(**command):
    return pb.ShardCommands(commands=[pb.ShardCommand(**command)]).SerializeToString()


class Impostor(grpc.GenericRpcHandler):
    """Takes all calls, keeps all that it is told, and answers shards with commands.

    `answer`: what it says to a method's call, bytes or an error."""

    def __init__(self, address="127.0.0.1:0", challenge=None, answer=lambda method: b""):
        self.heard, self.calls, self._challenge, self._answer = [], queue.SimpleQueue(), challenge, answer
        self._server = grpc.server(ThreadPoolExecutor(16), [self], options=[("grpc.so_reuseport", 0)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        self._server.start()

    def service(self, details):
        self.heard.append(repr(details.invocation_metadata).encode())
        return grpc.stream_stream_rpc_method_handler(lambda said, context: self._serve(details.method, said, context))

    def _serve(self, method, said, context):
        self.heard.append(next(said))
        self.calls.put(method)
        if method.endswith("/Register"):
            if self._challenge is not None:
                yield _message(challenge=self._challenge)
            yield _message(claim=pb.Claim(epoch=1 << 40, run="stolen"))
            yield _message(grant=pb.Grant(client=7, epoch=7, key=b"stolen"))
            self.heard.extend(said)
        elif isinstance(answer := self._answer(method), LoraServerError):
            context.set_trailing_metadata(((CODE_KEY, answer.code), (ANSWER_KEY, "0" * 64)))
            context.abort(status_of(answer), str(answer))
        else:
            yield answer  # b"" is a message of any type

    def close(self):
        self._server.stop(0).wait()


CHALLENGES = [None, pb.ControllerChallenge(nonce=bytes(32), proof=bytes(32)), pb.ControllerChallenge(nonce=b"x")]


@pytest.mark.parametrize("challenge", CHALLENGES)
def test_a_shard_believes_no_controller_that_does_not_prove_itself(challenge):
    """At its start it ends, since the nodes may have been given different tokens."""
    with contextlib.closing(Impostor(challenge=challenge)) as impostor:
        with shard_of(impostor.address, "any", SECRET, SOON) as (stream, told, end):
            error = end()
        assert isinstance(error, ConfigError) and "--join-token-file" in str(error)
        assert not told
        heard = b"".join(impostor.heard)
        assert SECRET.encode() not in heard and stream.instance.encode() not in heard


def test_a_shard_outlasts_an_impostor_and_finds_its_controller_again():
    controller = make_controller(timings=SOON)
    control = ControlServer(controller, "127.0.0.1:0", Doorkeeper(SECRET))
    address = f"127.0.0.1:{control.port}"
    with shard_of(address, controller.agreement.digest(), SECRET, SOON) as (stream, told, _):
        until(stream.up.is_set, "it registers")
        known = len(told)
        control.close(0)
        with contextlib.closing(Impostor(address, CHALLENGES[1])) as impostor:
            for _ in range(3):
                assert impostor.calls.get(timeout=HANG_SECONDS).endswith("/Register")
            assert all(command.claim.run != "stolen" and not command.HasField("grant") for command in told[known:])
            assert stream.instance.encode() not in b"".join(impostor.heard)
        control = ControlServer(controller, address, Doorkeeper(SECRET))
        until(lambda: controller.shards.live(), "it registers again")
        assert controller.shards.live()[0].registration.instance == stream.instance
    control.close(0)


def test_a_shard_waits_for_a_silent_controller_no_longer_than_a_handshake():
    silent = threading.Event()

    def nothing(*_):
        silent.wait(HANG_SECONDS)
        yield from ()

    with contextlib.closing(Impostor()) as impostor:
        impostor._serve = nothing
        with shard_of(impostor.address, "any", SECRET, SOON):
            until(lambda: len(impostor.heard) >= 2, "it tries again")
        silent.set()


def test_a_shard_leaves_a_controller_that_takes_its_connection_and_says_nothing_for_the_other():
    """As a host does that hangs, or another process at a port that was a controller's."""
    controller = make_controller(timings=SOON)
    control = ControlServer(controller, "127.0.0.1:0", Doorkeeper(SECRET))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{control.port}"
        with shard_of(address, controller.agreement.digest(), SECRET, SOON) as (stream, *_):
            until(stream.up.is_set, "it registers", 60)
    control.close(0)


def test_a_client_tells_neither_its_token_nor_its_key():
    secret = tokens.new()
    lease = Proof(3, 4, b"0123456789abcdef0123456789abcdef")
    credentials = Credentials(token=str(secret))
    with contextlib.closing(Impostor()) as impostor, open_channel(impostor.address, credentials) as channel:
        clients = rpc.ClientsStub(channel)
        asked = [
            (clients.Join, pb.JoinRequest(instance="x")),
            (clients.Heartbeat, signed(pb.HeartbeatRequest(), lease)),
            (clients.Borrow, borrow(lease._replace(client=5), lease)),
            (rpc.ServerStub(channel).Status, pb.StatusRequest()),
        ]
        for method, request in asked:
            with pytest.raises(ServerUnavailableError, match="does not prove that it knows the caller's token"):
                call(method, request, server=impostor.address, seconds=HANG_SECONDS)
        shown = AdapterDirectory(impostor.address, credentials)
        other = tokens.new()
        with pytest.raises(ServerUnavailableError, match="does not prove"):
            shown.who(str(other))
        node0 = Node0(impostor.address, Credentials(node_secret=SECRET), 0, "my name is", SOON)
        with node0.files("v1") as files, pytest.raises(AdapterSourceError, match="does not prove"):
            files.sizes(lambda: None)
        heard = b"".join(impostor.heard)
        assert secret.id.encode() in heard and other.id.encode() in heard
        for hidden in (secret.secret, other.secret, SECRET, "my name is"):
            assert hidden.encode() not in heard
        assert lease.key not in heard


@pytest.fixture
def gated(tmp_path):
    with contextlib.ExitStack() as stack:
        found = Gated(tmp_path, stack, controller=make_controller())
        yield found


def session_of(gated, seconds=HANG_SECONDS):
    """An engine's, with a token and no TLS; its shards are not connected to."""
    credentials = Credentials(token=gated.tokens["acme", Role.ENGINE])
    server = RemoteServer(gated.address, links=False, credentials=credentials, timings=Timings(heartbeat=0.05))
    return server.join(seconds)


def serve_again(gated):
    gated.control = ControlServer(gated.controller, gated.address, Doorkeeper(SECRET), gate=gated.gate)


def test_a_client_joins_no_impostor_and_connects_to_no_shard_of_it(gated):
    """With a lease that is complete, and an endpoint of its own."""
    joined = session_of(gated)
    joined.leave()
    gated.control.close(0)
    with socket.create_server(("127.0.0.1", 0)) as shard:
        spec, endpoint = joined.terms.spec.to_json(), f"tcp://127.0.0.1:{shard.getsockname()[1]}"
        lease = pb.Lease(client=1, epoch=1, key=bytes(32), lease_seconds=10, spec_json=spec, layout="ep1-pp1")
        lease.endpoints.add(shard=0, tcp=endpoint)
        with contextlib.closing(Impostor(gated.address, answer=lambda _: lease.SerializeToString())) as impostor:
            credentials = Credentials(token=gated.tokens["acme", Role.ENGINE])
            # the last of the tries within this second may be cut short
            with pytest.raises(
                ServerUnavailableError, match=r"does not prove that it knows the caller's|no answer within"
            ):
                RemoteServer(gated.address, "tcp", credentials=credentials).join(1.0)
            assert impostor.calls.get(timeout=HANG_SECONDS).endswith("/Join")
        shard.settimeout(0)
        with pytest.raises(BlockingIOError):
            shard.accept()
    serve_again(gated)
    session_of(gated).leave()


@pytest.mark.parametrize("answer", [LeaseError("its lease is gone"), b""], ids=["an error", "a reply"])
def test_a_client_outlasts_an_impostor_and_keeps_its_lease(gated, answer):
    session = session_of(gated)
    held = session.acquire(["bot"])
    gated.control.close(0)
    with contextlib.closing(Impostor(gated.address, answer=lambda _: answer)) as impostor:
        for _ in range(3):
            assert impostor.calls.get(timeout=HANG_SECONDS).endswith("/Heartbeat")
        session.check()
        with pytest.raises(ServerUnavailableError):
            session.ask(session.ticket(), ["bot"])
    serve_again(gated)

    def answers():
        with contextlib.suppress(ServerUnavailableError):  # the channel may not have found the server again
            return session.wait([1], 0.0) == [1]

    until(answers, "the server answers again")
    with pytest.raises(UnknownAdapterError):
        session.acquire(["none"])
    assert session.acquire(["bot"]) == held
    session.leave()


@pytest.mark.parametrize("method", ["RotateToken", "RevokeToken"])
def test_a_call_that_ends_its_own_token_is_answered(gated, method):
    token = gated.tokens["acme", Role.ADMIN]
    own = tokens.parse(token).id
    rotate, revoke = pb.RotateTokenRequest(id=own, overlap_seconds=0), pb.RevokeTokenRequest(id=own)
    gated.ask(token, "Access", method, rotate if method == "RotateToken" else revoke)
    with pytest.raises(UnauthenticatedError):
        gated.ask(token, "Access", "WhoIs", pb.WhoIsRequest())


def test_an_answer_proves_nothing_for_another_call(gated):
    """Neither the same call's next one, nor an answer that was changed on its way."""
    secret, taken = tokens.parse(gated.tokens["acme", Role.VIEWER]), []

    def ask():
        signed = sign_call(secret.id, secret.secret, "Access/WhoIs", b"")
        with open_channel(gated.address, Credentials()) as channel:
            method = channel.unary_unary("/lora_server.v1.Access/WhoIs")
            reply, done = method.with_call(b"", metadata=((AUTHORIZATION, str(signed)),), timeout=HANG_SECONDS)
        taken.append((signed, dict(done.trailing_metadata())[ANSWER_KEY], reply))

    ask(), ask()
    (one, proof, reply), (other, _, same) = taken
    assert reply == same and one.is_proven(proof, proofs.reply(reply))
    assert not other.is_proven(proof, proofs.reply(reply)), "it is for one call"
    assert not one.is_proven(proof, proofs.reply(reply + b"x"))
    assert not one.is_proven(proof, proofs.refusal("", reply.decode())) and not one.is_proven("", proofs.reply(reply))
