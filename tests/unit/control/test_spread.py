"""Many adapters on many shards: all shards are told of the first ones, two keep the record of each further one."""

import pytest

from lora_server.control.adapters.places import ListOrder
from lora_server.control.sync.spread import AdapterSpread
from lora_server.errors import AdapterLoadError
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import ToldShard, kept, make_controller, moved
from tests.support.serving import until

SHARDS, TOLD, NAMES = 4, 2, [f"a{number}" for number in range(1, 7)]


@pytest.fixture
def rig():
    """A controller that tells its four shards of two adapters in advance, and registers six."""
    controller = make_controller("ep4-pp1", settled=False)
    controller.adapters.sync.spread = AdapterSpread(SHARDS, TOLD * SHARDS)
    outlines = dict.fromkeys(NAMES[4:], "alike")
    known = [kept(name, number, outline=outlines.get(name, "")) for number, name in enumerate(NAMES, 1)]
    controller.adapters.recovery.adopt(known, (), 6)
    shards = [ToldShard(controller, shard=number, pool_bytes=100) for number in range(SHARDS)]
    yield controller, shards
    for one in shards:
        one.close()


def told(shard):
    """Return the handles that a shard loads, and those of which it keeps the record alone."""
    return sorted(shard.loaded), sorted(shard.memory.loads.keys() - shard.loaded)


def test_further_adapters_are_kept_by_two_shards_and_told_to_all_when_named(rig):
    controller, shards = rig
    kept_by = {0: [4, 6], 1: [3, 5], 2: [4, 6], 3: [3, 5]}
    until(lambda: all(told(one) == ([1, 2], kept_by[one.handle.shard]) for one in shards), "all shards were told")
    listings = controller.adapters.listings
    until(lambda: listings.states() == {"ready": 2, "disk": 4}, "the first two are loaded")
    lease, _ = controller.clients.join("engine")
    answer = controller.requests.acquire(lease.proof, ["a5"], ticket=1)
    assert answer.queued, "no shard has measured it"
    until(lambda: all(5 in one.loaded for one in shards), "all shards were told of it")
    for one in shards:
        moved(controller, one.handle, [pb.Residency(handle=5, bytes=1, measured=True)])
    assert controller.requests.acquire(lease.proof, ["a5"], ticket=1).queued is None


def test_what_shards_measured_of_one_adapter_they_need_not_measure_of_the_next(rig):
    """Adapters of one outline take the same: a client need not wait until all shards have looked at the next one."""
    controller, shards = rig
    lease, _ = controller.clients.join("engine")
    assert controller.requests.acquire(lease.proof, ["a5"], ticket=1).queued, "no shard has measured it"
    until(lambda: all(5 in one.loaded for one in shards), "all shards were told of it")
    for one in shards:
        moved(controller, one.handle, [pb.Residency(handle=5, bytes=40 + one.handle.shard, measured=True)])
    answer = controller.requests.acquire(lease.proof, ["a6"], ticket=2)
    assert answer.queued is None and [record.handle for record in answer.records] == [6]
    until(lambda: all(6 in one.loaded for one in shards), "all shards are told of it")
    sizes = [one.memory.loads[6].size for one in shards]
    assert sizes == [40, 41, 42, 43], "and do not measure it"
    assert controller.requests.acquire(lease.proof, ["a4"], ticket=3).queued, "its outline is not known"
    controller.adapters.sync.drop(5)
    assert controller.adapters.sync.sizes.unmeasured([6]) is None, "it is an adapter of that outline still"


def test_a_request_that_was_admitted_hears_that_a_shard_refuses_its_adapter(rig):
    """And shards that are asked again look at its files, so that the next request is told before it is admitted."""
    controller, shards = rig
    lease, _ = controller.clients.join("engine")
    sync = controller.adapters.sync
    for one in shards:
        sync.sizes.set_outline(5, "alike")
        sync.sizes.set_size(5, one.handle.shard, 40)
    shards[2].failure = "its place is taken"
    assert controller.requests.acquire(lease.proof, ["a6"], ticket=1, pace=0.0).loading is not None
    until(lambda: sync.residency.error(6), "the shard refused it")
    until(lambda: not controller.adapters.admission.queue.tickets.loading, "the request is answered")
    for ticket in (1, 2):
        with pytest.raises(AdapterLoadError, match="its place is taken"):
            controller.requests.acquire(lease.proof, ["a6"], ticket=ticket, pace=0.0)
    assert not controller.adapters.admission.holds.handles()
    sync.load(controller.adapters.catalog.by_handle(6), asked=True)
    until(lambda: all(not one.memory.loads[6].HasField("size") for one in shards), "they are to look at its files")


def test_a_shard_that_was_restarted_keeps_again_what_its_predecessor_kept(rig):
    controller, shards = rig
    shards[3].close()
    controller.shards.depart(shards[3].handle)
    shards[3] = ToldShard(controller, shard=3, pid=9, pool_bytes=100)
    until(lambda: told(shards[3]) == ([1, 2], [3, 5]), "it was told")


def test_a_shard_that_comes_back_is_asked_for_what_a_request_waits_for_and_only_told_of_the_rest(rig):
    """It fetches what it is asked for; after an outage that must not be everything."""
    controller, shards = rig
    lease, _ = controller.clients.join("engine")
    assert controller.requests.acquire(lease.proof, ["a5"], ticket=1).queued, "no shard has measured it"
    until(lambda: all(5 in one.loaded for one in shards), "all shards were told of it")
    gone = shards[3]
    gone.close()
    controller.shards.depart(gone.handle)
    gone.memory.loads.clear()
    shards[3] = ToldShard(controller, gone.memory, 3, pool_bytes=100)
    until(lambda: shards[3].memory.loads.keys() >= {1, 2, 3, 5} and shards[3].memory.loads[5].asked, "it is asked")
    assert [handle for handle, load in shards[3].memory.loads.items() if load.asked] == [5]


def test_a_restarted_controller_learns_of_all_adapters_though_a_shard_died_with_it(rig):
    controller, shards = rig
    until(lambda: all(len(one.memory.loads) == 4 for one in shards), "all shards were told")
    for one in shards:
        one.close()
    memories = [None, *(one.memory for one in shards[1:])]
    successor = make_controller("ep4-pp1", settled=False)
    successor.adapters.sync.spread = AdapterSpread(SHARDS, TOLD * SHARDS)
    shards[:] = [ToldShard(successor, memory, number, pool_bytes=100) for number, memory in enumerate(memories)]
    assert successor.start.settled.is_set() and successor.arrivals.run == controller.arrivals.run
    assert [one.record.name for one in successor.adapters.listings.all()] == NAMES
    until(lambda: told(shards[0]) == ([1, 2], [4, 6]), "the shard that is new keeps what the one that died kept")


def test_the_hottest_adapters_are_those_that_clients_hold(rig):
    controller, _ = rig
    lease, _ = controller.clients.join("engine")
    controller.adapters.admission.restore(lease.client, [6])
    hottest = controller.adapters.listings.hottest({"a4": 7}, 3)
    assert [one.record.name for one in hottest][:2] == ["a6", "a4"]
    assert controller.adapters.listings.tenants(lambda name: "") == {"": (6, 1)}


def test_a_list_is_in_order_whatever_the_order_of_its_changes():
    order = ListOrder()
    for place in (("b", 2), ("a", 3), ("b", 1), ("b", 2)):
        order.add(place)
    assert order.after() == [("a", 3), ("b", 1), ("b", 2)] and order.after(("b", 1)) == [("b", 2)]
    order.remove(("b", 1))
    assert order.after() == [("a", 3), ("b", 2)] and order.has("b") and not order.has("aa") and not order.has("c")
