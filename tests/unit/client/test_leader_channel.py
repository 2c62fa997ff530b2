"""A channel to two controllers: which calls are made again at the other one. They are gRPC servers that count."""

import threading
from concurrent import futures

import grpc
import pytest

from lora_server.errors import ConfigError, NotLeaderError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import CODE_KEY
from lora_server.wire.leader import leader_of
from lora_server.wire.rpc import call, open_channel
from tests.support.serving import HANG_SECONDS, until

SILENT, STANDS_BY, LEADS, STARTS = "a connection that broke", "not_leader", "", "server_unavailable"


class Counting(rpc.ServerServicer):
    """Answers Status as `answers` says: the code of an error of ours, SILENT for gRPC's own, or LEADS."""

    def __init__(self):
        self.answers, self.calls, self.may_answer = LEADS, 0, threading.Event()
        self.may_answer.set()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        rpc.add_ServerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Status(self, request, context):  # noqa: N802 (gRPC names it)
        self.calls += 1
        assert self.may_answer.wait(HANG_SECONDS)
        if self.answers in (STANDS_BY, STARTS):
            context.set_trailing_metadata(((CODE_KEY, self.answers),))
        if self.answers:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.answers)
        return pb.StatusReply(pid=1)

    def stop(self):
        self._server.stop(None).wait(HANG_SECONDS)


@pytest.fixture
def both():
    found = [Counting(), Counting()]
    yield found
    for one in found:
        one.stop()


def asks(both):
    address = ",".join(one.address for one in both)
    with open_channel(address) as channel:
        return call(rpc.ServerStub(channel).Status, pb.StatusRequest(), server=address, seconds=HANG_SECONDS).pid


def counted(both):
    return [one.calls for one in both]


def test_a_call_that_a_standby_refused_is_made_at_the_leader(both):
    both[0].answers = STANDS_BY
    assert [asks(both), asks(both)] == [1, 1]
    assert counted(both) == [1, 2], "later calls go to the leader at once"


def test_a_call_without_a_connection_is_made_at_the_other(both):
    both[0].stop()
    assert asks(both) and counted(both) == [0, 1]


def test_a_call_that_may_have_been_carried_out_is_not_made_again(both):
    both[0].answers = SILENT
    with pytest.raises(ServerUnavailableError, match=SILENT):
        asks(both)
    assert counted(both) == [1, 0]
    assert asks(both) and counted(both) == [1, 1], "the next call goes to the other"


def test_a_leader_that_is_not_ready_is_asked_again(both):
    both[0].answers = STARTS
    for _ in range(2):
        with pytest.raises(ServerUnavailableError):
            asks(both)
    assert counted(both) == [2, 0]


def test_the_last_refusal_is_raised_where_none_leads(both):
    for one in both:
        one.answers = STANDS_BY
    with pytest.raises(NotLeaderError):
        asks(both)
    assert counted(both) == [1, 1]
    assert leader_of(",".join(one.address for one in both)) == both[0].address, "it begins anew"


@pytest.mark.parametrize("cancels", [True, False])
def test_a_call_that_its_caller_cancelled_says_nothing_of_the_leader(both, cancels):
    """One that a controller lets wait for too long does."""
    both[0].may_answer.clear()
    address, ended = ",".join(one.address for one in both), threading.Event()
    with open_channel(address) as channel:
        begun = rpc.ServerStub(channel).Status.future(pb.StatusRequest(), timeout=HANG_SECONDS if cancels else 0.5)
        begun.add_done_callback(lambda _: ended.set())
        if cancels:
            begun.cancel()
        assert ended.wait(HANG_SECONDS)
        expected = both[0 if cancels else 1].address
        until(lambda: leader_of(address) == expected, "it is noted")
    both[0].may_answer.set()


def test_a_list_of_addresses_is_checked():
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        open_channel("127.0.0.1:7400, 127.0.0.1:7401")
