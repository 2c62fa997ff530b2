"""A drain goes on under the next controller, and ends at its deadline."""

import pytest

from lora_server.control.members.shards import ShardHandle
from lora_server.errors import ServerUnavailableError, UnknownAdapterError
from tests.support.controllers import make_controller, registration
from tests.support.restarts import SECONDS, Killed, Server, dies
from tests.support.serving import until

LONG = 3600.0


@pytest.fixture
def server(tmp_path, tiny_adapters):
    one = Server(tmp_path, tiny_adapters)
    yield one
    one.close()


def add_of_directory(server):
    server.adapters.register_directory({"law": server.paths["all"]})
    server.controller.arrivals.announce()


def add(server):
    server.adapters.add("law", str(server.paths["all"]), SECONDS)


def hold(server, came=add):
    """Have a client acquire the adapter `law`; the next controller does not know that before the client says so."""
    came(server)
    lease, _ = server.controller.clients.join("engine")
    ((record,), _) = server.adapters.acquire(lease.client, ["law"])
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
    server.adapters.update("law", str(server.paths["down"]), SECONDS, seconds)


@pytest.mark.parametrize("came", [add, add_of_directory])
@pytest.mark.parametrize("goes", [remove, update])
def test_a_deadline_outlives_the_controller(server, came, goes):
    client, handles = hold(server, came)
    goes(server, 0.05)
    server.kill()
    cut_off_in_time(server)
    server.adapters.restore(client, handles)
    assert not server.adapters.holds(client, handles), "it was cut off before the controller knew that it held it"
    until(lambda: len(server.shard.memory.loads) == len(states(server)) == (goes is update), "shards drop it", SECONDS)


def test_a_hold_is_not_cut_off_before_its_deadline(server):
    client, handles = hold(server)
    server.adapters.remove("law", LONG)
    server.kill()
    server.adapters.cut_off()
    assert list(states(server).values()) == ["draining"]
    server.adapters.restore(client, handles)
    assert server.adapters.held(client) == ["law"]
    server.adapters.release(client, handles)
    assert not states(server)


@pytest.mark.parametrize(
    ("method", "seconds", "removed"), [("_unlist", 0.05, True), ("_forget", 0.0, False)], ids=["told", "stored"]
)
def test_a_controller_that_is_killed_in_a_removal_did_all_of_it_or_nothing(
    server, monkeypatch, method, seconds, removed
):
    """Before its shards are told, and before it is stored: then the deadline means nothing."""
    hold(server)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, server.adapters, method, False)
        server.adapters.remove("law", seconds)
    server.kill()
    if removed:
        cut_off_in_time(server)
        with pytest.raises(UnknownAdapterError):
            server.adapters.get("law")
    else:
        server.adapters.cut_off()
        assert list(states(server).values()) == ["ready"]


def test_a_draining_server_goes_on_draining_under_the_next_controller(server):
    client, handles = hold(server)
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
    assert server.controller.drain.begin(0) == 1
    server.shard.close()
    server.shard = None
    server.database.close()
    server.start()
    assert not server.controller.drain.reason, "a new server, whose shards are new, does not drain"


def test_nothing_is_drained_and_no_client_joins_before_all_shards_have_spoken():
    controller = make_controller(settled=False)
    controller.shards.arrive(ShardHandle(registration(0)), False)  # its state is still being read
    for refused in (lambda: controller.drain.begin(0), lambda: controller.clients.join("early")):
        with pytest.raises(ServerUnavailableError, match="waits for its shards"):
            refused()
