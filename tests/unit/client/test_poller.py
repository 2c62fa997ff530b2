"""The thread that asks for waiting requests again, against a real controller."""

import time
from itertools import chain

import pytest

from client_connector.remote import LoadingAnswer, RemoteServer
from client_connector.serving.poller import AdapterRequest, AdmissionPoller, AdmissionTicket
from client_connector.serving.request_state import RequestEvent
from lora_server.access.identity import Role
from lora_server.control.members.shards import wait_all
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.credentials import Credentials
from tests.support.controllers import make_controller, moved
from tests.support.gated import Gated
from tests.support.serving import HANG_SECONDS, until

LONG = Timings(await_call=HANG_SECONDS, queue_wait=HANG_SECONDS, call=2 * HANG_SECONDS)


@pytest.fixture
def joined(tmp_path, stack):
    """A controller whose Await calls last until they are answered, and a session of an engine."""
    gated = Gated(tmp_path, stack, controller=make_controller(settled=False, timings=LONG))
    credentials = Credentials(token=gated.tokens["", Role.ENGINE])
    session = RemoteServer(gated.address, links=False, credentials=credentials, timings=LONG).join(HANG_SECONDS)
    stack.callback(session.leave)
    return gated, session


@pytest.fixture
def polled(joined):
    """A poller of this session, and the names that each of its calls was granted."""
    _, session = joined
    asked = []

    def ask(requests):
        for one in requests:
            (held,) = session.ask(one.ticket.number, [one.name])
            one.state = one.state.after(RequestEvent.GRANTED, held=held).state
        asked.append([one.name for one in requests])
        return requests

    poller = AdmissionPoller(ask, lambda: True, lambda request, is_up: None, LONG)
    yield poller, asked
    poller.close()


def report(gated, *names, layers=None):
    """The shard reports that it has so many layers of these adapters, or all."""
    layers = gated.controller.agreement.spec.layers if layers is None else layers
    reports = [pb.Residency(handle=gated.handles[name], layers=layers) for name in names]
    moved(gated.controller, gated.shard.handle, reports)


def loading(gated, session, name):
    """A request whose adapter is loading, as the driver hands it to the poller."""
    session.release([one.handle for one in session.acquire([name])])  # shards are told of it when it is named first
    commands = gated.shard.handle.commands
    wait_all([commands.send(pb.ShardCommand(revoke=0))], HANG_SECONDS, "what the shard was told before")
    report(gated, name, layers=0)
    request = AdapterRequest(name, name, ticket=AdmissionTicket(session, session.ticket()))
    answer = session.ask(request.ticket.number, [name], pace=0.0)
    assert isinstance(answer, LoadingAnswer) and answer.seconds is None
    request.state = request.state.after(RequestEvent.NO_WEIGHTS, held=answer.held[0]).state
    return request


def test_a_long_wait_for_some_requests_delays_no_request_that_comes_later(joined, polled):
    (gated, session), (poller, asked), began = joined, polled, time.monotonic()
    poller.add(loading(gated, session, "law"))
    until(lambda: poller._wait is not None, "it waits for the first")
    poller.add(loading(gated, session, "org/art"))
    report(gated, "org/art")
    until(lambda: [*chain(*asked)] == ["org/art"], "the second is answered", HANG_SECONDS / 2)
    report(gated, "law")
    until(lambda: [*chain(*asked)] == ["org/art", "law"] and not len(poller), "and the first", HANG_SECONDS / 2)
    assert time.monotonic() - began < HANG_SECONDS


def test_requests_that_are_answered_together_are_asked_for_together(joined, polled):
    (gated, session), (poller, asked), names = joined, polled, ["law", "org/art"]
    with poller._changed:  # the first wait is for both
        for name in names:
            poller.add(loading(gated, session, name))
    report(gated, *names)
    until(lambda: not len(poller), "both are answered")
    assert asked == [names]
