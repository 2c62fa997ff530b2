"""What a resize needs before it begins, and what of it outlives the server."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from lora_server.control.resize import ResizeSupport
from lora_server.errors import ConfigError, LeaseError, ServerUnavailableError
from lora_server.registry.database import FILE, Database
from lora_server.registry.layouts import Layouts, PlacedLayout
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Proof
from tests.support.controllers import ToldShard, make_controller
from tests.support.serving import HANG_SECONDS, until

OFFERED = ResizeSupport(refusal="")


@pytest.mark.parametrize(
    ("layout", "seconds", "support", "error"),
    [
        (
            "ep2-pp1",
            60,
            ResizeSupport(refusal="a server with 2 nodes cannot"),
            "got ep2-pp1, and a server with 2 nodes",
        ),
        ("ep2-pp1", 0, OFFERED, "--seconds: got 0, expected 1 to 3600"),
        ("ep1-pp1", 60, OFFERED, "expected another than the server's own"),
        ("ep1-pp33", 60, OFFERED, "1 of 33 shards would own nothing"),
        ("large", 60, OFFERED, "expected epX-ppY"),
    ],
)
def test_a_resize_that_cannot_begin_says_why_and_starts_nothing(layout, seconds, support, error):
    ran = []
    controller = make_controller(resize=support._replace(run_layouts=ran.append))
    controller.start.registered.set()
    shard = ToldShard(controller)
    with pytest.raises(ConfigError, match=error):
        controller.resize.run(layout, seconds)
    assert not ran and controller.agreement.generation == 1 and controller.resize.outcomes["failed"] == int(seconds > 0)
    shard.close()


def test_a_resize_whose_shards_do_not_come_leaves_the_server_as_it_was():
    ran, soon = [], Timings(drain_look=0.001)
    controller = make_controller(resize=OFFERED._replace(run_layouts=ran.append), timings=soon)
    controller.start.registered.set()
    shard = ToldShard(controller)
    with pytest.raises(ServerUnavailableError, match=r"not ready within 1 s \(starting: 0 of 2\)"):
        controller.resize.run("ep2-pp1", 1)
    assert ran == [{1: "ep1-pp1", 2: "ep2-pp1"}, {1: "ep1-pp1"}]
    assert controller.shards.beside is controller.adapters.sync.beside is None
    with pytest.raises(ServerUnavailableError):
        controller.resize.run("ep1-pp2", 1)
    assert ran[2] == {1: "ep1-pp1", 3: "ep1-pp2"}, "no number is used twice"
    shard.close()


def test_a_client_of_an_earlier_controller_is_waited_for_until_it_says_by_what_its_steps_go():
    controller = make_controller(restarted=True)
    leases = controller.clients.leases
    leases.adopt([pb.Grant(client=one, epoch=1, key=bytes([one])) for one in (1, 2, 3)], 3)

    def behind():
        return [lease.client for lease, _ in leases.silences() if lease.is_behind(2)]

    for client, generation in ((1, 1), (2, 0), (3, 2)):
        assert client in behind()
        controller.clients.heartbeat(Proof(client, 1, bytes([client])), generation=generation)
    assert behind() == [1]


def test_an_old_shard_that_restarts_while_clients_move_serves_those_that_have_not():
    new = []

    def run_layouts(layouts):
        if 2 in layouts and not new:
            digest = controller.arrivals.beside.digest()
            new.extend(ToldShard(controller, shard=shard, generation=2, agreement=digest) for shard in range(2))

    controller = make_controller(resize=OFFERED._replace(run_layouts=run_layouts), timings=Timings(drain_look=0.001))
    controller.start.registered.set()
    digest, old = controller.agreement.digest(), ToldShard(controller)
    controller.clients.leases.adopt([pb.Grant(client=1, epoch=1, key=b"1")], 1)
    controller.clients.heartbeat(Proof(1, 1, b"1"), generation=1)
    with ThreadPoolExecutor(1) as thread:
        resized = thread.submit(controller.resize.run, "ep2-pp1", HANG_SECONDS)
        until(lambda: controller.resize.status().state == "moving", "the new shards serve")
        old.close()
        controller.arrivals.depart(old.handle)
        again = ToldShard(controller, generation=1, agreement=digest)
        until(lambda: any(one.kept.grant.client == 1 for one in again.memory.reports(lambda _: 0)), "it has the client")
        controller.clients.heartbeat(Proof(1, 1, b"1"), generation=2)
        assert (resized.result(HANG_SECONDS).moved, resized.result().ended) == (1, 0)
    with pytest.raises(LeaseError, match="placement generation 1, expected 2"):
        ToldShard(controller, generation=1, agreement=digest)
    for shard in (again, *new):
        shard.close()


def test_a_link_to_a_new_shard_that_ends_before_its_client_moved_ends_no_lease():
    controller = make_controller(restarted=True)
    leases, controller.shards.generation = controller.clients.leases, 2
    leases.adopt([pb.Grant(client=one, epoch=1, key=bytes([one])) for one in (1, 2)], 2)
    for client in (1, 2):
        controller.clients.heartbeat(Proof(client, 1, bytes([client])), generation=client)
        controller.clients.gone(0, client, 1)
    assert [one.client for one, _ in leases.silences()] == [1], "it tries again; the other one's shards are gone"


def test_a_restart_serves_the_layout_of_the_last_resize_unless_its_flag_has_changed(tmp_path):
    with contextlib.closing(Database(f"sqlite:///{tmp_path / FILE}")) as database:
        layouts = Layouts(database, "10.0.0.1:7400", "ep2-pp1")
        assert layouts.current() == PlacedLayout("ep2-pp1", 1)
        layouts.put(PlacedLayout("ep2-pp2", 2))
        layouts.put(PlacedLayout("ep1-pp2", 3))
        assert Layouts(database, "10.0.0.1:7500", "ep2-pp1").current() == ("ep1-pp2", 3)
        assert Layouts(database, "10.0.0.1:7400", "ep4-pp1").current() == ("ep4-pp1", 1)
