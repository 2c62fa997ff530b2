"""The controller's side of replicas: what counts while a twin is down, and what a client's lost connections mean."""

import pytest

from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.shards import wait_all
from lora_server.control.sync.residency import ResidencyTable
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.placement import Layout, Placement
from lora_server.timings import DEFAULTS
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import SPEC, drained, registration

LAYOUT = Layout(2, 1, replicas=2)  # shards 0 and 1, and their twins 2 and 3
HANDLE = 7


@pytest.fixture
def controller(clock):
    return Controller(Agreement(SPEC, LAYOUT, "float32", "independent", 64), clock=clock)


def arrive(controller, shard, **fields):
    own = {"pid": shard + 1, "pool_bytes": 4096, "agreement_digest": controller.agreement.digest()} | fields
    return controller.arrivals.arrive(registration(shard, **own), [])


@pytest.fixture
def handles(controller):
    return [arrive(controller, shard) for shard in range(LAYOUT.num_shards)]


def test_a_start_waits_for_twins_but_not_for_ever(controller, clock):
    for shard in (0, 3):
        arrive(controller, shard)
    clock.advance(DEFAULTS.twin_wait / 2)
    controller.arrivals.settle()
    assert not controller.start.settled.is_set()
    clock.advance(DEFAULTS.twin_wait / 2)
    controller.arrivals.settle()
    assert controller.start.settled.is_set(), "there is one of each"
    assert controller.not_ready() == "registering adapters" and controller.degraded == [1, 2]


def test_a_start_is_settled_when_all_twins_are_there_and_never_without_one_of_each(controller, clock):
    for shard in (0, 2):
        arrive(controller, shard)
    clock.advance(DEFAULTS.twin_wait)
    controller.arrivals.settle()
    assert not controller.start.settled.is_set() and controller.not_ready() == "shards not up: [1]"
    assert controller.degraded == []
    for shard in (1, 3):
        arrive(controller, shard)
    assert controller.start.settled.is_set()


def test_twins_with_different_pools_are_refused_with_both_figures(controller):
    arrive(controller, 0)
    with pytest.raises(ConfigError, match=r"shard 2 of node 1: got a device pool of 8,192 bytes, expected 4,096, .*0;"):
        arrive(controller, 2, node=1, pool_bytes=8192)
    arrive(controller, 1, pool_bytes=8192)


def test_a_command_waits_for_no_shard_whose_twin_is_up(controller, handles):
    pending = [handle.commands.send(pb.ShardCommand(drop=1)) for handle in handles[:2]]
    for handle, one in zip(handles, pending, strict=False):
        controller.arrivals.depart(handle)
        wait_all([one], 1, "a drop")
    last = handles[2].commands.send(pb.ShardCommand(drop=1))
    controller.arrivals.depart(handles[2])
    with pytest.raises(ServerUnavailableError, match=r"shards \[0\] of ep2-pp1 are not up"):
        controller.shards.require_up()
    assert last.error is not None and not last.is_needless


def test_a_silent_shard_is_let_go_while_its_twin_is_heard(controller, handles, clock):
    clock.advance(1.0)
    for handle in handles[2:]:
        controller.shards.update(handle, pb.ShardStats())
    clock.advance(1.5)
    controller.shards.end_silent(2.0)
    pending = [handle.commands.send(pb.ShardCommand(drop=1)) for handle in handles]
    assert [one.finished.is_set() for one in pending] == [True, True, False, False]
    clock.advance(1.0)
    controller.shards.end_silent(2.0)
    assert not pending[2].finished.is_set(), "no other shard is heard: the controller itself may have stood still"


def residency(layers):
    return pb.Residency(handle=HANDLE, layers=layers)


def test_an_adapter_is_loaded_when_the_shards_that_count_have_it():
    table, all_layers = ResidencyTable(Placement(SPEC, LAYOUT)), SPEC.layers
    for shard in range(3):
        table.report(shard, residency(all_layers))
    assert table.seconds_left(HANDLE) and table.num_layers(HANDLE) == 0
    table.set_idle({3})
    assert table.seconds_left(HANDLE) == 0 and table.num_layers(HANDLE) == all_layers
    table.set_idle(())
    table.report(3, residency(all_layers - 1))
    assert table.seconds_left(HANDLE) and table.is_behind(3, [HANDLE]) and not table.is_behind(1, [HANDLE])
    table.report(3, residency(all_layers))
    assert table.seconds_left(HANDLE) == 0 and not table.is_behind(3, [HANDLE])


def test_a_shard_is_not_behind_where_no_twin_is_further():
    table = ResidencyTable(Placement(SPEC, LAYOUT))
    table.report(1, residency(1))
    assert not table.is_behind(3, [HANDLE])


def test_a_client_is_gone_when_it_has_a_connection_to_no_twin(controller, handles):
    leases, clients = controller.clients.leases, controller.clients
    lease = leases.grant("engine")
    clients.gone(handles[1], lease.client, lease.epoch)
    clients.gone(handles[2], lease.client, lease.epoch)
    assert leases.find(lease.client, lease.epoch), "it has one to shard 3, and one to shard 0"
    assert [one.shard for one in clients.twins.offer(lease.client, [2], 1)] == [2], "it has one to shard 1 again"
    assert not clients.twins.offer(lease.client, [2], 2), "shards of another placement have its numbers"
    clients.gone(handles[3], lease.client, lease.epoch)
    assert leases.find(lease.client, lease.epoch)
    clients.gone(handles[0], lease.client, lease.epoch)
    assert leases.find(lease.client, lease.epoch) is None


def test_a_client_without_the_only_twin_that_is_up_is_gone(controller, handles):
    lease = controller.clients.leases.grant("engine")
    controller.arrivals.depart(handles[3])
    controller.clients.gone(handles[1], lease.client, lease.epoch)
    assert controller.clients.leases.find(lease.client, lease.epoch) is None


def test_a_shard_that_comes_back_is_told_the_clients_before_what_they_hold(controller, handles):
    lease = controller.clients.leases.grant("engine")
    lease.grant = pb.Grant(client=lease.client, epoch=lease.epoch, key=lease.proof.key)
    controller.adapters.admission.holds.acquire(lease.client, [HANDLE])
    controller.arrivals.depart(handles[2])
    commands = [command.WhichOneof("command") for command in drained(arrive(controller, 2, pid=9))]
    assert commands.index("grant") < commands.index("uses")


def test_clients_that_push_are_spread_over_replicas(controller):
    leases = controller.clients.leases
    first, idle, second, third = (leases.grant("engine", replicas=one) for one in (2, 0, 2, 2))
    assert (first.replica, second.replica, third.replica, idle.replica) == (0, 1, 0, -1)
    leases.end(second.client, second.epoch)
    assert leases.grant("engine", replicas=2).replica == 1, "the engine that preferred it has left"
