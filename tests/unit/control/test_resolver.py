"""Names that nobody registered: brought once, however many ask; what leads nowhere is remembered for a while."""

import shutil
import threading

import pytest

from client_connector.directory import Directory
from client_connector.transformers import attach
from lora_server.control.adapters.resolver import COMING, REFUSED_SECONDS, Resolver
from lora_server.demo.engine import generate
from lora_server.demo.launch import running_server
from lora_server.errors import (
    AdapterSourceError,
    ConfigError,
    ServerBusyError,
    ServerUnavailableError,
    UnknownAdapterError,
)
from tests.support.serving import HANG_SECONDS, until
from tests.support.workload import NEW_TOKENS, workload

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


def test_all_who_ask_wait_for_one_addition(bringing):
    for _ in range(5):
        with pytest.raises(ServerBusyError, match="is being brought from s3://adapters/acme/team/bot; ask again"):
            bringing.resolver.ask("acme/team/bot")
    bringing.settled()
    assert bringing.asked == [("acme/team/bot", "s3://adapters/acme/team/bot")]
    assert bringing.resolver.uri("law") == "s3://adapters/default/law"


def test_what_leads_nowhere_is_not_looked_for_again_for_a_while(bringing):
    bringing.fails = {
        "gone": AdapterSourceError("got no config there"),
        "later": ServerUnavailableError(""),
    }
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
    bringing.now += REFUSED_SECONDS + 1
    with pytest.raises(ServerBusyError):
        bringing.resolver.ask("gone")
    bringing.settled()
    assert [name for name, _ in bringing.asked].count("gone") == 2
    with pytest.raises(UnknownAdapterError, match="expected 1 to 200 letters"):
        bringing.resolver.ask("../../etc")


def test_there_is_an_end_to_what_is_brought_at_once(bringing):
    for number in range(COMING + 10):
        with pytest.raises(ServerBusyError):
            bringing.resolver.ask(f"name-{number}")
    bringing.settled()
    assert len(bringing.asked) == COMING


@pytest.mark.parametrize(
    "template", ["", "s3://adapters", "/adapters/{name}", "s3://{other}/{name}", "s3://{name", "s3://{}"]
)
def test_what_is_no_template(template):
    with pytest.raises(ConfigError, match=r"--resolve: got .*expected a URL with {name}"):
        Resolver(template, lambda *_: None)


def test_a_name_that_nobody_registered_is_served(tmp_path):
    load, root = workload("mixtral"), tmp_path / "adapters"
    shutil.copytree(load.paths["fused"], root / "acme" / "law")
    flags = [
        "--base-model",
        str(load.base),
        "--adapter-root",
        str(root),
        "--resolve",
        f"file://{root}/{{tenant}}/{{name}}",
    ]
    with running_server(tmp_path / "log", flags) as server:
        directory = Directory(server.address)
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["acme/law"]):
                got = generate(load.model, [load.batch[load.names.index("fused")]], NEW_TOKENS)[0]
            assert got.tokens == load.expected[load.names.index("fused")].tokens
            with pytest.raises(UnknownAdapterError, match="not registered here, and not to be had from"):
                with lora.adapters(["acme/none"]):
                    pass
            with pytest.raises(UnknownAdapterError, match="not to be had from"):
                directory.get("other/law")
            shutil.copytree(load.paths["qv"], root / "default" / "code")
            assert directory.get("code").lora_rank == 4, "who only looks brings it as well"
        directory.close()
