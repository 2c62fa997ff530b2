"""Names that an engine knows by a server's events: kept while these come, and never older than they say."""

import asyncio
from collections import Counter

import pytest

from client_connector.directory import AdapterDirectory
from client_connector.events import EventFollower, KnownAdapters
from client_connector.serving.lookup import Lookup
from lora_server.control.adapters.records import Record
from lora_server.errors import UnknownAdapterError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.events import AdapterAdded, AdapterRemoved, ResidencyChanged
from tests.support.controllers import kept
from tests.support.followed_events import Publishing
from tests.support.serving import until


@pytest.fixture
def known(clock):
    known = KnownAdapters(clock.now)
    known.renew(2.0)
    return known


def keep(known, name, tenant="", full="", **fields):
    known.keep(name, tenant, pb.Adapter(name=full or name, **fields), known.changes)


def test_a_name_is_known_until_an_event_changes_it(known):
    keep(known, "law")
    keep(known, "art")
    assert known.find("law").name == "law" and known.find("other") is None
    known.apply(AdapterRemoved("law", "v"))
    assert known.find("law") is None and known.find("art") is not None
    known.forget("art")
    assert known.find("art") is None, "removed by this engine, whose event is under way"


def test_a_name_that_a_tenant_would_mean_something_else_by_is_asked_for_again(known):
    """acme's `bot` was the operator's; now it has one of its own."""
    keep(known, "bot", "acme", full="bot")
    keep(known, "bot", "rival", full="bot")
    known.apply(AdapterAdded("acme/bot", "v", 1, 4, 100))
    assert known.find("bot", "acme") is None
    assert known.find("bot", "rival") is not None


def test_an_answer_from_before_an_event_is_not_kept(known):
    before = known.changes
    known.apply(AdapterAdded("law", "new", 2, 4, 100))
    known.keep("law", "", pb.Adapter(name="law", version="old"), before)
    assert known.find("law") is None


def test_residency_follows_events_of_the_same_version(known):
    keep(known, "law", handle=7, state="loading")
    known.apply(ResidencyChanged("law", "v", 8, "disk"))
    assert known.find("law").state == "loading", "of another version"
    known.apply(ResidencyChanged("law", "v", 7, "ready"))
    assert known.find("law").state == "ready"


def test_nothing_is_known_once_events_cease(known, clock):
    keep(known, "law")
    clock.advance(2.0)
    assert known.find("law") is None
    known.renew(2.0)
    assert known.find("law") is not None
    known.clear()
    known.renew(2.0)
    assert known.find("law") is None, "events were lost"


class CountingDirectory(AdapterDirectory):
    """Counts the calls for each name."""

    def __init__(self, address):
        super().__init__(address)
        self.calls = Counter()

    def get(self, name, on_behalf_of=""):
        self.calls[name] += 1
        return super().get(name, on_behalf_of)


@pytest.fixture
def following(tmp_path, stack):
    publishing = Publishing(tmp_path, stack, timings=Timings(event_silence=1.0))
    adapters = publishing.controller.adapters
    record = Record.decode(kept("law", 70_000).record)
    with adapters.changes.lock:
        adapters.changes.offer(record, eager=False)
    directory = CountingDirectory(publishing.address)
    stack.callback(directory.close)
    follower = EventFollower(publishing.address, timings=publishing.timings)
    stack.callback(follower.close)
    return publishing, directory, follower, record


def test_a_known_name_costs_no_call_and_a_removed_one_is_refused(following):
    publishing, directory, follower, record = following
    lookup = Lookup(directory, 10.0, known=follower.known)

    def ask():
        return asyncio.run(lookup.get("law"))

    until(lambda: ask() and follower.known.find("law") is not None, "the stream has begun")
    calls = directory.calls["law"]
    assert [ask().version for _ in range(100)] == ["v1"] * 100
    assert directory.calls["law"] == calls
    with publishing.controller.adapters.changes.lock:
        publishing.controller.adapters.changes.unlist(record)
    until(lambda: follower.known.find("law") is None, "the event came")
    with pytest.raises(UnknownAdapterError):
        ask()
    assert directory.calls["law"] == calls + 1


def test_without_events_each_name_is_asked_for_again(following):
    publishing, directory, follower, _ = following
    lookup = Lookup(directory, 10.0, known=follower.known)
    until(lambda: asyncio.run(lookup.get("law")) and follower.known.find("law") is not None, "the stream has begun")
    publishing.publisher.close()
    until(lambda: follower.known.find("law") is None, "neither an event nor a heartbeat came")
    calls = directory.calls["law"]
    for _ in range(3):
        asyncio.run(lookup.get("law"))
    assert directory.calls["law"] == calls + 3
