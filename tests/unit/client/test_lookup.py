"""Names that requests ask for while the server is away: looked for again until it is back, or away for too long."""

import asyncio
import contextlib

import pytest

from client_connector.directory import Directory
from client_connector.serving.lookup import Lookup
from lora_server.control.adapters.registry import Record
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.demo.launch import free_address
from lora_server.errors import ServerUnavailableError, UnknownAdapterError
from tests.support.controllers import kept, make_controller
from tests.support.serving import HANG_SECONDS


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
