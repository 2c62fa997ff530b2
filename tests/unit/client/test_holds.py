"""What a session acquires and releases: in few calls, each request answered on its own, also when the lease ends."""

import threading
import time

import pytest

from client_connector.holds import MOST_NAMES, QueuedAnswer
from client_connector.remote import RemoteServer
from lora_server.errors import AdmissionError, ConfigError, ServerUnavailableError, UnknownAdapterError
from lora_server.timings import DEFAULTS, Timings
from tests.support.controllers import PlacedServer
from tests.support.serving import HANG_SECONDS, until

NAMES = ("law", "code", "art")


class Server(PlacedServer):
    """A controller that has two places for three adapters, and an engine's session with it."""

    def __init__(self, stack, timings=DEFAULTS):
        super().__init__(stack, NAMES, places=2)
        self.session = RemoteServer(self.address, links=False, timings=timings).join(HANG_SECONDS)
        stack.callback(self.session.leave)
        self.calls = []  # the entries of each
        ask = self.session.calls.clients.Hold

        def counted(request, **more):
            self.calls.append(len(request.entries))
            return ask(request, **more)

        self.session.calls.clients.Hold = counted


@pytest.fixture
def server(stack):
    return Server(stack)


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
        server.session.acquire(["art"], time.monotonic() + 1.0)
    server.session.release([70_000, 70_001])
    assert server.held() == {} and server.session.acquire(["art"])[0].handle == 70_002


def test_releases_of_one_tick_go_in_one_call_and_none_waits_for_long(stack):
    """With the next request's call, or once `release_gap` has passed; a release that is waited for goes at once."""
    server = Server(stack, Timings(release_gap=HANG_SECONDS))
    session = server.session
    for _ in range(3):
        session.acquire(["law"])
    session.release([70_000], waits=False), session.release([70_000], waits=False)
    assert server.calls == [1, 1, 1] and server.held() == {70_000: 3}
    assert session.acquire(["code"])[0].handle == 70_001
    assert server.calls == [1, 1, 1, 2] and server.held() == {70_000: 1, 70_001: 1}
    session.release([70_000], waits=False), session.release([70_001])
    assert server.calls == [1, 1, 1, 2, 1] and server.held() == {}
    server = Server(stack, Timings(release_gap=0.01))
    server.session.acquire(["law"])
    server.session.release([70_000], waits=False)
    until(lambda: server.held() == {}, "it goes alone")


def test_a_session_that_was_left_answers_at_once(server, busy):
    waiting = server.session.ask_soon(server.session.ticket(), ["code"])
    server.session.leave()
    for answer in (waiting, server.session.ask_soon(server.session.ticket(), ["law"])):
        with pytest.raises(ServerUnavailableError, match="this session was left"):
            answer.result(HANG_SECONDS)
    server.session.release([70_000])
