"""What a session acquires and releases: in few calls, each request answered on its own, also when the lease ends."""

import contextlib
import threading
import time

import pytest

from client_connector.holds import MOST_NAMES, QueuedAnswer
from client_connector.remote import RemoteServer
from lora_server.control.adapters.records import Record
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.errors import AdmissionError, ConfigError, ServerUnavailableError, UnknownAdapterError
from tests.support.controllers import ToldShard, kept, make_controller
from tests.support.serving import HANG_SECONDS

NAMES = ("law", "code", "art")


class Server:
    """A controller that has two places for three adapters, and an engine's session with it."""

    def __init__(self, stack):
        self.controller = make_controller(settled=False, most_active=2)
        self.shard = ToldShard(self.controller)
        for handle, name in enumerate(NAMES, start=70_000):
            self.controller.adapters.catalog.publish(Record.decode(kept(name, handle).record))
            self.controller.adapters.sync.sizes.set_size(handle, 0, 1)
        self.shard.handle.registration.pool_bytes = 1 << 20
        self.controller.adapters.sync.sizes.set_capacity(0, 1 << 20)
        control = ControlServer(self.controller, "127.0.0.1:0", Doorkeeper(""))
        stack.callback(lambda: control.close(0.2))
        stack.callback(self.shard.close)
        self.session = RemoteServer(f"127.0.0.1:{control.port}", links=False).join(HANG_SECONDS)
        stack.callback(self.session.leave)
        self.calls = []  # the entries of each
        ask = self.session.calls.clients.Hold

        def counted(request, **more):
            self.calls.append(len(request.entries))
            return ask(request, **more)

        self.session.calls.clients.Hold = counted

    def held(self):
        """How often the session holds what."""
        holds = self.controller.adapters.admission.holds
        return {handle: holds.by_client(handle).total() for handle in holds.handles()}


@pytest.fixture
def server():
    with contextlib.ExitStack() as stack:
        yield Server(stack)


@pytest.fixture
def busy(server):
    """Keep the session's sender busy: what is asked in the test goes with the next call, once the event is set."""
    entered, go = threading.Event(), threading.Event()
    first = server.session.ask_soon(server.session.ticket(), ["law"])
    first.add_done_callback(lambda _: (entered.set(), go.wait(HANG_SECONDS)))
    assert entered.wait(HANG_SECONDS)
    yield go
    go.set()


def test_what_is_asked_while_a_call_is_under_way_goes_with_the_next(server, busy):
    asked = [server.session.ask_soon(server.session.ticket(), [NAMES[n % 2]]) for n in range(500)]
    server.session.release([70_000], waits=False)
    busy.set()
    assert [one.result(HANG_SECONDS)[0].name for one in asked] == [NAMES[n % 2] for n in range(500)]
    assert server.held() == {70_000: 250, 70_001: 250} and server.calls == [1, 501]


def test_each_request_of_a_call_has_an_answer_of_its_own(server, busy):
    session, answers = server.session, {}
    for name in ("code", "art", "nothing"):
        answers[name] = session.ask_soon(session.ticket(), [name])
    with pytest.raises(ConfigError, match=r"AcquireRequest\.names: got 266 characters"):
        session.ask_soon(session.ticket(), ["x" * 266])
    busy.set()
    assert [one.name for one in answers["code"].result(HANG_SECONDS)] == ["code"]
    queued = answers["art"].result(HANG_SECONDS)
    assert isinstance(queued, QueuedAnswer) and queued.position == 1 and queued.held[0].name == "art"
    with pytest.raises(UnknownAdapterError, match="'nothing'"):
        answers["nothing"].result(HANG_SECONDS)
    assert server.calls == [1, 3]


def test_a_call_has_as_many_names_as_one_request_may_have(server):
    many = ["law"] * (MOST_NAMES - 1)
    asked = [server.session.ask_soon(server.session.ticket(), names) for names in (["law"], many, many, ["code"])]
    assert [len(one.result(HANG_SECONDS)) for one in asked] == [1, MOST_NAMES - 1, MOST_NAMES - 1, 1]
    assert server.held() == {70_000: 2 * MOST_NAMES - 1, 70_001: 1}


def test_a_request_that_is_given_up_holds_nothing(server):
    server.session.acquire(["law", "code"])
    with pytest.raises(AdmissionError, match="still queued, at position 1"):
        server.session.acquire(["art"], time.monotonic() + 0.05)
    server.session.release([70_000, 70_001])
    assert server.held() == {} and server.session.acquire(["art"])[0].handle == 70_002


def test_a_session_that_was_left_answers_at_once(server, busy):
    waiting = server.session.ask_soon(server.session.ticket(), ["code"])
    server.session.leave()
    for answer in (waiting, server.session.ask_soon(server.session.ticket(), ["law"])):
        with pytest.raises(ServerUnavailableError, match="this session was left"):
            answer.result(HANG_SECONDS)
    server.session.release([70_000])
