"""Names that requests ask for while the server is away: looked for again until it is back, or away for too long."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from client_connector.directory import Directory
from client_connector.serving.holder import Holder
from client_connector.serving.lookup import Lookup
from client_connector.serving.settings import Settings
from lora_server.control.adapters.registry import Record
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.demo.launch import free_address, launch, running_server
from lora_server.errors import ServerUnavailableError, UnknownAdapterError
from tests.support.controllers import kept, make_controller
from tests.support.serving import HANG_SECONDS, kill, until
from tests.support.workload import workload


@pytest.fixture
def away():
    """An address where nobody listens yet, and how to begin: a server with adapter law."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        directory = Directory(address)
        stack.callback(directory.close)

        def begin():
            controller = make_controller()
            stack.callback(controller.shards.close)
            controller.adapters._registry.add(Record.decode(kept("law", 70_000).record))
            stack.callback(ControlServer(controller, address, Doorkeeper("")).close, 0.2)

        yield directory, begin


class Clock:
    """That of a test; who looks at it says so."""

    def __init__(self):
        self.now, self.looked = 0.0, asyncio.Event()

    def __call__(self):
        self.looked.set()
        return self.now


def run(play):
    asyncio.run(asyncio.wait_for(play, HANG_SECONDS))


def test_a_name_waits_for_the_server_and_is_found(away):
    directory, begin = away

    async def play():
        clock = Clock()
        lookup = Lookup(directory, 1.0, clock)
        asked = [asyncio.create_task(lookup.get(name)) for name in ("law", "nobody")]
        await clock.looked.wait()
        await asyncio.to_thread(begin)
        assert (await asked[0]).name == "law"
        with pytest.raises(UnknownAdapterError):
            await asked[1]

    run(play())


def test_an_outage_has_so_much_time_for_all(away):
    directory, begin = away

    async def play():
        clock = Clock()
        lookup = Lookup(directory, 10.0, clock)
        first = asyncio.create_task(lookup.get("law"))
        await clock.looked.wait()
        with pytest.raises(ServerUnavailableError, match="is it running"):
            await lookup.get("law", waits=False)
        assert not first.done()
        clock.now = 10.0
        with pytest.raises(ServerUnavailableError):
            await first
        with pytest.raises(ServerUnavailableError):
            await lookup.get("law")  # at once: this clock stands still
        await asyncio.to_thread(begin)
        while True:
            with contextlib.suppress(ServerUnavailableError):
                assert (await lookup.get("law")).name == "law"
                break
        assert lookup._away_since is None, "the next outage has its own time"

    run(play())


def test_the_first_request_after_a_long_outage_is_served(tmp_path):
    """Requests have failed at once, since the server was away for longer than any waits: now it is back."""
    load = workload("llama")
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters)]
    first = launch(tmp_path / "first", *flags)
    first.wait_ready()
    name = next(iter(load.paths))
    holder = Holder(Settings(first.address, timeout_seconds=5.0), lambda text: ())
    try:
        kill(first)
        until(lambda: is_refused(holder, name), "it has been away for longer than any request waits")
        with running_server(tmp_path / "second", [*flags, "--listen", first.address]):
            use = holder.hold("next", name, ())
            until(lambda: use.held is not None or use.failure is not None, "it is answered")
            assert use.failure is None, use.failure
    finally:
        holder.close()


def is_refused(holder, name):
    use = holder.hold("r", name, ())
    until(lambda: use.held is not None or use.failure is not None, "it is answered")
    holder.release("r")
    return use.failure is not None
