"""What drains does so under the next controller, too, and no longer than it may."""

from __future__ import annotations

import pytest

from lora_server.errors import ServerUnavailableError, UnknownAdapterError
from tests.support.controllers import make_controller
from tests.support.restarts import SECONDS, Killed, Server, dies
from tests.support.serving import until

LONG = 3600.0


@pytest.fixture
def server(tmp_path):
    one = Server(tmp_path)
    yield one
    one.close()


def hold(server, name):
    """A client has it, and the next controller does not know that before it says so."""
    lease, _ = server.controller.clients.join("engine")
    ((record,), _) = server.adapters.acquire(lease.client, [name])
    return lease.client, [record.handle]


def states(server):
    return {one.record.version[:8]: one.state for one in server.adapters.listings()}


def cut_off_in_time(server):
    def gone():
        server.adapters.cut_off()
        return "draining" not in states(server).values()

    until(gone, "whoever holds it still is cut off", SECONDS)


def remove(server, seconds):
    server.adapters.remove("law", seconds)


def update(server, seconds):
    server.adapters.update("law", str(server.paths["qv"]), SECONDS, seconds)


def add_of_directory(server):
    server.adapters.register_directory({"law": server.paths["fused"]})
    server.controller.arrivals.announce()


def add(server):
    server.adapters.add("law", str(server.paths["fused"]), SECONDS)


@pytest.mark.parametrize("came", [add, add_of_directory])
@pytest.mark.parametrize("goes", [remove, update])
def test_a_deadline_outlives_the_controller(server, came, goes):
    came(server)
    hold(server, "law")
    goes(server, 0.05)
    server.kill()
    cut_off_in_time(server)
    until(lambda: len(server.shard.memory.loads) == len(states(server)) == (goes is update), "shards drop it", SECONDS)


def test_what_has_time_left_or_as_long_as_it_needs_is_not_cut_off(server):
    add(server)
    client, handles = hold(server, "law")
    server.adapters.remove("law", LONG)
    server.kill()
    server.adapters.cut_off()
    assert list(states(server).values()) == ["draining"]
    server.adapters.restore(client, handles)
    assert server.adapters.held(client) == ["law"]
    server.adapters.release(client, handles)
    assert not states(server)


def test_a_controller_that_is_killed_before_its_shards_are_told(server, monkeypatch):
    add(server)
    hold(server, "law")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, server.adapters, "_unlist", False)
        server.adapters.remove("law", 0.05)
    server.kill()
    cut_off_in_time(server)
    with pytest.raises(UnknownAdapterError):
        server.adapters.get("law")


def test_a_deadline_of_what_was_not_removed_after_all_means_nothing(server, monkeypatch):
    add(server)
    hold(server, "law")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, server.adapters, "_forget", False)
        server.adapters.remove("law", 0.0)
    server.kill()
    server.adapters.cut_off()
    assert list(states(server).values()) == ["ready"]


def test_a_client_that_was_cut_off_while_nobody_knew_it_holds_nothing(server):
    add(server)
    client, handles = hold(server, "law")
    server.adapters.remove("law", 0.0)
    server.kill()
    cut_off_in_time(server)
    server.adapters.restore(client, handles)
    assert not server.adapters.holds(client, handles)


def test_a_server_that_drains_does_so_under_the_next_controller(server):
    add(server)
    client, handles = hold(server, "law")
    assert server.controller.drain.begin(0) == 1
    server.kill()
    assert server.controller.not_ready() == "draining"
    with pytest.raises(ServerUnavailableError, match="draining"):
        server.controller.clients.join("another")
    server.adapters.restore(client, handles)
    assert server.adapters.acquire(client, ["law"], ticket=1)[1].reason == "draining"
    assert server.controller.drain.begin(0) == 1, "and whoever asks is told how far it is"
    server.controller.drain.resume()
    assert server.adapters.acquire(client, ["law"], ticket=1)[1] is None
    server.kill()
    assert server.controller.not_ready() != "draining"


def test_a_server_that_is_started_anew_serves(server):
    assert server.controller.drain.begin(0) == 0
    server.shard.close()
    server.shard = None
    server.database.close()
    server.start()
    assert not server.controller.drain.reason


def test_nothing_is_drained_before_anybody_knows_who_holds_what():
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        make_controller(settled=False).drain.begin(0)
