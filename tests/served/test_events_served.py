"""Events of a real server: what the command prints, and what a reader has when the controller is killed."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from client_connector.directory import AdapterDirectory
from lora_server.access.identity import Role
from lora_server.access.store import Store, Tenant
from lora_server.demo import children
from lora_server.demo.launch import running_server
from lora_server.errors import ServerUnavailableError
from lora_server.registry.database import FILE, Database
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.event_stream import EventStream
from lora_server.wire.rpc import open_channel
from tests.support.doc_commands import blocks
from tests.support.serving import HANG_SECONDS, flags, until


def ask(address, service, method, request):
    with open_channel(address) as channel:
        return getattr(getattr(rpc, f"{service}Stub")(channel), method)(request, timeout=HANG_SECONDS)


@pytest.fixture
def server(load, tmp_path):
    with running_server(tmp_path / "log", flags(load, "--adapter-root", str(load.adapters))) as server:
        yield server


def test_the_command_prints_what_happened_and_what_happens(server, load):
    """The commands of docs/events.md, which name no server."""
    source = str(next(load.adapters.iterdir()))
    command = [sys.executable, "-m", "lora_server", "events", "--server", server.address, "--json"]
    kept = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert kept.returncode == 0, kept.stderr
    before = [json.loads(line) for line in kept.stdout.splitlines()]
    names = {path.name for path in load.adapters.iterdir() if path.is_dir()}
    assert {one["name"] for one in before if one["type"] == "AdapterAdded"} == names
    assert {one["state"] for one in before if one["type"] == "ShardChanged"} == {"up"}

    follower = children.start([*command, "--follow"], stdout=subprocess.PIPE)
    found, directory = [], AdapterDirectory(server.address)
    listening = threading.Thread(target=lambda: [found.append(json.loads(line)) for line in follower.stdout])
    listening.start()

    def is_told():
        directory.add("again", source)  # anew, since the follower may not have subscribed yet
        directory.remove("again")
        ours = [one["type"] for one in found if one["topic"] == "adapter//" and one["name"] == "again"]
        return {"AdapterAdded", "AdapterRemoved"} <= set(ours)

    try:
        until(is_told, "the follower prints both")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(HANG_SECONDS) == 0
    finally:
        follower.kill()
        listening.join(HANG_SECONDS)
        follower.stdout.close()
        directory.close()


def test_the_page_s_example_follows_advice(server):
    """The Python block of docs/events.md, with this server's address in place of the page's."""
    (text,) = [block.text for block in blocks("docs/events.md") if block.language == "python"]
    example = text.replace('"127.0.0.1:7400"', repr(server.address))
    assert example != text
    process = children.start([sys.executable, "-u", "-c", example], stdout=subprocess.PIPE, text=True)
    said: set[str] = set()
    listening = threading.Thread(target=lambda: [said.add(line) for line in process.stdout])
    listening.start()
    try:
        with EventStream(server.address, kinds=("advice",)) as stream:

            def told(ready):
                found = [event.ready for one in stream.take(0.5) for event in one.batch.events]
                return ready in found

            def turns():
                ask(server.address, "Server", "Drain", pb.DrainRequest())
                until(lambda: told(False), "the server says that it drains")
                ask(server.address, "Server", "Resume", pb.ResumeRequest())
                until(lambda: told(True), "the server says that it is ready")
                assert process.poll() is None, "the example goes on for ever"
                return said >= {"hold back: draining 0\n", "send requests 0\n"}

            until(turns, "the example said both")  # it may have subscribed behind the first
    finally:
        process.kill()
        process.wait(HANG_SECONDS)
        listening.join(HANG_SECONDS)
        process.stdout.close()


def test_the_socket_is_for_this_user_alone(server):
    endpoint = Path(ask(server.address, "Events", "Open", pb.OpenEventsRequest()).endpoint.removeprefix("ipc://"))
    assert endpoint.is_socket()
    assert stat.S_IMODE(endpoint.parent.stat().st_mode) == 0o700


def test_a_reader_knows_that_the_controller_was_killed(server):
    """It is told that it has to begin anew; then it follows the next controller, at the same place."""
    with EventStream(server.address) as stream:
        os.kill(ask(server.address, "Server", "Status", pb.StatusRequest()).pid, signal.SIGKILL)
        with pytest.raises(ServerUnavailableError, match=r"some are lost|no heartbeat|cannot be reached"):
            until(lambda: stream.take(0.5) and False, "the epoch is another")

    def follows():
        try:
            with EventStream(server.address) as stream:
                return stream.take(2.0) or stream.silent_seconds < 2.0
        except ServerUnavailableError:
            return False

    until(follows, "events come from the next controller")


def test_events_over_tcp_are_encrypted_and_go_with_their_tokens(load, tmp_path):
    """A tenant's reader has what is about its own adapter, and not what is about another's."""
    data = tmp_path / "data"
    data.mkdir()
    with contextlib.closing(Database(f"sqlite:///{data / FILE}")) as database:
        store = Store(database)
        secrets = {}
        for tenant in ("", "acme", "rival"):
            if tenant:
                store.set_tenant(Tenant(tenant))
            secrets[tenant] = Credentials(token=str(store.create_token(tenant, Role.ADMIN)[1]))
    source = shutil.copytree(next(load.adapters.iterdir()), tmp_path / "acme" / "files")
    more = ("--events", "tcp://127.0.0.1:0", "--data-dir", str(data), "--adapter-root", str(tmp_path))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_server(tmp_path / "log", flags(load, *more)))
        readers = {
            tenant: stack.enter_context(EventStream(server.address, shown, ("adapter",)))
            for tenant, shown in secrets.items()
        }
        for reader in readers.values():
            until(lambda reader=reader: reader.take(0.5) or reader.has_begun, "its subscription works")
        with contextlib.closing(AdapterDirectory(server.address, secrets["acme"])) as directory:
            directory.add("mine", str(source))
            directory.remove("mine")
        found = {tenant: [] for tenant in readers}

        def came():
            for tenant, reader in readers.items():
                found[tenant] += [
                    (type(event).__name__, event.name) for one in reader.take(0.5) for event in one.batch.events
                ]
            return len(found["acme"]) == len(found[""]) == 2

        until(came, "both events")
        assert found["acme"] == found[""] == [("AdapterAdded", "acme/mine"), ("AdapterRemoved", "acme/mine")]
        assert found["rival"] == []


def test_without_events_the_command_says_how_to_have_them(load, tmp_path):
    with running_server(tmp_path / "log", flags(load, "--events", "off")) as server:
        command = [sys.executable, "-m", "lora_server", "events", "--server", server.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert done.returncode == 2
        assert "--events: got off, expected ipc" in done.stderr
