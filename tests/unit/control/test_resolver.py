"""Names that are not registered: each is loaded once for all callers; a failure is remembered for a while."""

import threading

import pytest

from lora_server.control.adapters.resolver import COMING, Resolver
from lora_server.errors import (
    AdapterSourceError,
    ConfigError,
    ServerBusyError,
    ServerUnavailableError,
    UnknownAdapterError,
)
from lora_server.timings import Timings
from tests.support.serving import HANG_SECONDS, until

TEMPLATE = "s3://adapters/{tenant}/{name}"


class Bringing:
    """What a resolver adds to; it adds when it is told to."""

    def __init__(self, template=TEMPLATE):
        self.now, self.asked, self.fails, self.go = 0.0, [], {}, threading.Event()
        self.resolver = Resolver(template, self.add, lambda: self.now)

    def add(self, name, uri, seconds):
        self.asked.append((name, uri))
        assert self.go.wait(HANG_SECONDS)
        if name in self.fails:
            raise self.fails[name]

    def settled(self):
        self.go.set()
        until(lambda: not self.resolver._coming, "nothing comes any more")


@pytest.fixture
def bringing():
    one = Bringing()
    yield one
    one.settled()
    one.resolver.close()


def test_callers_of_one_name_share_one_load(bringing):
    for _ in range(5):
        with pytest.raises(ServerBusyError, match="is being brought from s3://adapters/acme/team/bot; ask again"):
            bringing.resolver.ask("acme/team/bot")
    bringing.settled()
    assert bringing.asked == [("acme/team/bot", "s3://adapters/acme/team/bot")]
    assert bringing.resolver.uri("law") == "s3://adapters/default/law"


def test_a_source_that_failed_is_not_asked_again_for_a_while(bringing):
    bringing.fails = {"gone": AdapterSourceError("got no config there"), "later": ServerUnavailableError("")}
    bringing.go.set()
    for name in ("gone", "later"):
        with pytest.raises(ServerBusyError):
            bringing.resolver.ask(name)
    bringing.settled()
    with pytest.raises(UnknownAdapterError, match="not to be had from s3://adapters/default/gone: got no config"):
        bringing.resolver.ask("gone")
    with pytest.raises(ServerBusyError):
        bringing.resolver.ask("later")
    bringing.settled()
    bringing.now += Timings.resolve_again + 1
    with pytest.raises(ServerBusyError):
        bringing.resolver.ask("gone")
    bringing.settled()
    assert [name for name, _ in bringing.asked].count("gone") == 2
    with pytest.raises(UnknownAdapterError, match="expected 1 to 200 letters"):
        bringing.resolver.ask("../../etc")


def test_the_number_of_concurrent_loads_is_limited(bringing):
    for number in range(COMING + 10):
        with pytest.raises(ServerBusyError):
            bringing.resolver.ask(f"name-{number}")
    bringing.settled()
    assert len(bringing.asked) == COMING


@pytest.mark.parametrize(
    "template", ["", "s3://adapters", "/adapters/{name}", "s3://{other}/{name}", "s3://{name", "s3://{}"]
)
def test_a_bad_template_is_refused(template):
    with pytest.raises(ConfigError, match=r"--resolve: got .*expected a URL with {name}"):
        Resolver(template, lambda *_: None)
