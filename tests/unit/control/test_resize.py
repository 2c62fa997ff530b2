"""What a resize needs before it begins, what of it outlives the server, and who is told a placement's generation."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from lora_server.control.adapters.records import Record
from lora_server.control.controller import Controller
from lora_server.control.members.nodes import NodeTable
from lora_server.control.members.shards import ShardHandle
from lora_server.control.new_shards import NewShards
from lora_server.control.reports.status import status
from lora_server.control.resize import ResizeSupport
from lora_server.daemon.kept import Kept
from lora_server.errors import AdapterLoadError, ConfigError, LeaseError, ServerUnavailableError
from lora_server.registry.layouts import Layouts, PlacedLayout
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Proof
from tests.support.controllers import SPEC, ToldShard, kept, make_controller, moved, registration
from tests.support.serving import HANG_SECONDS, until

OFFERED = ResizeSupport(refusal="")
SOON = Timings(shard_poll=0.001)


def followed(resize=OFFERED, **settings):
    """A controller with one shard, and the list of the layouts that its one node was to run."""
    controller, ran = make_controller(resize=resize, **settings), []
    controller.start.registered.set()
    node = controller.nodes.connect(0, lambda: ran.append(controller.nodes.layouts))
    return controller, ToldShard(controller), node, ran


def proof(client):
    return Proof(client, 1, bytes([client]))


def adopt(controller, *clients):
    """Have the controller learn of clients of an earlier one."""
    grants = [pb.Grant(client=one, epoch=1, key=proof(one).key) for one in clients]
    controller.clients.leases.adopt(grants, max(clients))


def beat(controller, client, generation):
    """A client says by which placement its steps go."""
    controller.clients.heartbeat(proof(client), generation=generation)


def new_shard(controller, number, generation=2, **fields):
    return ToldShard(controller, shard=number, generation=generation, endpoint=pb.Endpoint(shard=number), **fields)


def starting(controller, then=lambda number: None, **fields):
    """Have the controller's one node start the shards of each new layout, and call `then` for each; return them."""
    new, begun = [], {1}

    def start():
        generation = max(controller.nodes.layouts)
        if generation not in begun:
            begun.add(generation)
            agreement = controller.arrivals.other
            for number in range(agreement.layout.num_shards):
                new.append(new_shard(controller, number, generation, agreement_digest=agreement.digest(), **fields))
                then(number)

    controller.nodes.connect(0, start)
    controller.start.registered.set()
    return new


NO_PORTS = "a server with --data-port-base 7500 cannot"


@pytest.mark.parametrize(("layout", "seconds", "support", "error"), [
    ("ep2-pp1", 60, ResizeSupport(refusal=NO_PORTS), f"got ep2-pp1, and {NO_PORTS}: start it with that --layout"),
    ("ep2-pp1", 0, OFFERED, "--seconds: got 0, expected 1 to 3600"),
    ("ep1-pp1", 60, OFFERED, "expected another than the server's own"),
    ("ep1-pp33", 60, OFFERED, "1 of 33 shards would own nothing"),
    ("large", 60, OFFERED, "expected epX-ppY"),
])  # fmt: skip
def test_a_resize_that_cannot_begin_says_why_and_starts_nothing(layout, seconds, support, error):
    controller, shard, _, ran = followed(resize=support)
    with pytest.raises(ConfigError, match=error):
        controller.resize.run(layout, seconds)
    assert not ran and controller.agreement.generation == 1 and controller.resize.outcomes["failed"] == int(seconds > 0)
    shard.close()


def test_a_resize_whose_shards_do_not_come_leaves_the_server_as_it_was():
    controller, shard, _, ran = followed(timings=SOON)
    late = r"not ready within 1 s \(starting: 0 of 2; not up are shards \[0, 1\] on node 0\); the server serves on"
    with pytest.raises(ServerUnavailableError, match=late):
        controller.resize.run("ep2-pp1", 1)
    assert ran == [{1: "ep1-pp1", 2: "ep2-pp1"}, {1: "ep1-pp1"}]
    assert controller.shards.other is controller.adapters.sync.other is None
    with pytest.raises(ServerUnavailableError):
        controller.resize.run("ep1-pp2", 1)
    assert ran[2] == {1: "ep1-pp1", 3: "ep1-pp2"}, "no number is used twice"
    shard.close()


def test_a_client_of_an_earlier_controller_is_waited_for_until_it_says_by_what_its_steps_go():
    controller = make_controller(restarted=True)
    adopt(controller, 1, 2, 3)

    def behind():
        return [lease.client for lease, _ in controller.clients.leases.silences() if lease.is_behind(2)]

    for client, generation in ((1, 1), (2, 0), (3, 2)):
        assert client in behind()
        beat(controller, client, generation)
    assert behind() == [1]


def resizing(controller, thread, layout="ep2-pp1"):
    """Resize in a thread, with HANG_SECONDS for each part."""
    return thread.submit(controller.resize.run, layout, HANG_SECONDS)


def test_a_node_that_cannot_start_its_shards_or_is_lost_ends_the_resize_by_name():
    agreement = make_controller("ep1-pp1").agreement
    nodes = NodeTable(agreement, 3)
    controller, shard, first, ran = followed(timings=SOON, nodes=nodes)
    second, third = nodes.connect(1, lambda: None), nodes.connect(2, lambda: None)
    failures = {
        "ep2-pp1 cannot be started: node 1: no memory": lambda: nodes.fail(1, max(nodes.layouts), "no memory"),
        "ep2-pp1 cannot be started: node 1: its connection to the controller ended": lambda: nodes.disconnect(second),
    }
    with ThreadPoolExecutor(1) as thread:
        for text, fail in failures.items():
            resized = resizing(controller, thread)
            until(lambda: len(nodes.layouts) == 2, "the nodes are to start its shards")
            nodes.fail(2, max(nodes.layouts), "it has none of the shards, so this is no matter")
            fail()
            with pytest.raises(ServerUnavailableError, match=text):
                resized.result(HANG_SECONDS)
            assert ran[-1] == {1: "ep1-pp1"} and controller.agreement.generation == 1
        with pytest.raises(ServerUnavailableError, match=r"shards \[1\] on node 1, which is not connected"):
            thread.submit(controller.resize.run, "ep2-pp1", 1).result(HANG_SECONDS)
    for connection in (first, third):
        nodes.disconnect(connection)
    shard.close()


def test_nodes_with_other_flags_are_refused_and_a_rank_may_be_connected_twice_for_a_while():
    nodes, other = NodeTable(make_controller().agreement, 2), make_controller("ep1-pp2").agreement
    nodes.check(1, nodes.agreement.digest())
    with pytest.raises(ConfigError, match=r"node 1: started with other settings than the controller's \(.*layout ep1"):
        nodes.check(1, other.digest())
    older, newer = (nodes.connect(1, lambda: None) for _ in range(2))
    nodes.disconnect(older)
    assert not nodes.failure(replace(other, generation=1))
    nodes.disconnect(newer)
    assert "node 1" in nodes.failure(replace(other, generation=1))
    nodes.run({1: "ep1-pp1", 2: "ep1-pp2"})
    assert not nodes.failure(replace(other, generation=2)), "it may come in time"


@pytest.fixture
def controller():
    """A controller of two adapters, which are spread."""
    controller = make_controller()
    for handle in (1, 2):
        controller.adapters.catalog.publish(Record.decode(kept(f"a{handle}", handle).record))
    controller.adapters.sync.spread.add([1, 2])
    return controller


@pytest.fixture
def new(controller):
    """The new shards of a resize of it: two, with pools of 10 bytes, that know both adapters."""
    sync = make_controller("ep2-pp1").adapters.sync
    sync.spread.add([1, 2])
    for shard in range(2):
        sync.sizes.set_capacity(shard, 10)
    return NewShards(sync, controller.agreement, controller.adapters, controller.nodes)


def measure(new, handle, *sizes):
    """Have each of the new shards measure an adapter."""
    for shard, nbytes in enumerate(sizes):
        new.sync.sizes.set_size(handle, shard, nbytes)
        new.sync.residency.opened(handle, shard)


def pin(controller, *handles):
    controller.adapters.admission.queue.capacity.set_pinned(frozenset(handles))
    controller.adapters.admission.queue.update()


def test_every_adapter_has_to_fit_together_with_the_pinned_ones_and_is_looked_at_once(controller, new):
    measure(new, 1, 5, 5)
    new.require_fit()
    assert new.unchecked == [2] and new.awaited() == "; not loaded are a2"
    measure(new, 2, 11, 0)
    with pytest.raises(ConfigError, match="no place for a2: 11 bytes are needed"):
        new.require_fit()
    measure(new, 2, 6, 0)
    new.require_fit()
    assert not new.unchecked and not new.awaited()
    measure(new, 1, 99, 0)
    new.require_fit()  # no version changes its size
    measure(new, 1, 5, 0)
    pin(controller, 1)
    with pytest.raises(ConfigError, match=r"no place for a2: .*of which 5 are pinned"):
        new.require_fit()


@pytest.mark.parametrize("is_active", [True, False], ids=["active", "idle"])
def test_an_adapter_that_failed_on_the_serving_shards_is_checked_where_new_ones_can_load_it(controller, new, is_active):
    controller.adapters.sync.residency.opened(1, 0, "cannot read /x")
    if is_active:
        pin(controller, 1)
    measure(new, 2, 1, 1)
    new.require_fit()
    assert new.unchecked == [1], "it is waited for"
    measure(new, 1, 11, 1)
    with pytest.raises(ConfigError, match="no place for a1: 11 bytes are needed"):
        new.require_fit()


def test_what_is_in_use_is_checked_as_soon_as_its_measured_part_does_not_fit(controller, new):
    controller.adapters.catalog.publish(Record.decode(kept("a3", 3).record))
    new.sync.spread.add([3])
    pin(controller, 1, 2, 3)
    measure(new, 1, 6, 6)
    measure(new, 2, 5, 5)
    with pytest.raises(ConfigError, match="no place for a1, a2: 11 bytes are needed together"):
        new.require_fit()


def test_an_adapter_that_the_new_shards_cannot_load_is_named_unless_it_is_idle_and_fails_everywhere(controller, new):
    serving = controller.adapters.sync.residency
    measure(new, 2, 1, 1)
    new.sync.residency.opened(1, 1, "cannot read /x")
    with pytest.raises(AdapterLoadError, match=r"ep1-pp1: adapter a1 cannot be loaded there, .*: cannot read /x; mend"):
        new.require_fit()
    serving.opened(1, 0, "cannot read /x")
    new.require_fit()
    assert not new.unchecked
    pin(controller, 1)
    with pytest.raises(AdapterLoadError, match="unpin it"):
        new.require_fit()


def test_an_idle_adapter_whose_files_a_node_lacks_is_not_waited_for(controller, new):
    measure(new, 2, 1, 1)
    measure(new, 1, 1)
    new.sync.residency.report(1, pb.Residency(handle=1, remote=True))
    new.require_fit()
    assert not new.unchecked
    pin(controller, 1)
    new.require_fit()
    assert new.unchecked == [1], "a shard that has to load it fetches it"


def test_an_idle_adapter_whose_files_came_after_the_shards_looked_is_waited_for_a_while(controller, new):
    measure(new, 2, 1, 1)
    measure(new, 1, 1)
    new.sync.residency.opened(1, 0)
    new.require_fit(is_late=True)
    assert new.unchecked == [1], "one is still to look"
    new.sync.residency.opened(1, 1)
    new.require_fit()
    assert new.unchecked == [1]
    new.require_fit(is_late=True)
    assert not new.unchecked
    pin(controller, 1)
    new.require_fit(is_late=True)
    assert new.unchecked == [1]


def test_no_layout_serves_before_it_has_measured_what_is_in_use(controller, new):
    pin(controller, 1)
    measure(new, 1, 1)
    reason = controller.adapters.admission.swap(new.sync)
    assert reason == "its shard 1 has not measured an adapter that came into use"
    assert controller.shards.layout.num_shards == 1


def test_what_is_in_use_and_does_not_fit_is_waited_for_but_not_what_a_request_wanted_together(controller, new):
    queue = controller.adapters.admission.queue
    for handle in (1, 2):
        measure(new, handle, 6, 6)
    for number, names in enumerate((["a1"], ["a2"]), start=1):
        assert queue.acquire(1, number, names) == [number]
    new.require_fit()
    assert "no place for a1, a2: 12 bytes are needed together" in str(new.crowded())
    assert controller.adapters.admission.swap(new.sync).startswith("12 bytes are needed together on shard 0")
    queue.release(1, [2])
    assert new.crowded() is None
    assert queue.acquire(1, 3, ["a1", "a2"]) == [1, 2]
    queue.release(1, [1, 1, 2])
    assert new.crowded() is None
    with pytest.raises(ConfigError, match="no place for a1, a2: 12 bytes are needed together"):
        new.require_fit()
    measure(new, 2, 1, 1)
    new.require_fit()
    assert controller.adapters.admission.swap(new.sync) == ""
    assert controller.shards.layout.num_shards == 2


def test_a_resize_waits_until_what_is_in_use_fits_and_is_refused_once_its_seconds_have_passed(database):
    def tell_sizes(number):
        for handle in (1, 2):
            controller.adapters.sync.other.sizes.set_size(handle, number, 6)

    layouts = Layouts(database, "10.0.0.1:7400", "ep1-pp1")
    soon = Timings(shard_poll=0.001, resize_warm=0.0)
    controller = make_controller(resize=ResizeSupport(layouts, ""), timings=soon)
    queue = controller.adapters.admission.queue
    for handle in (1, 2):
        controller.adapters.catalog.publish(Record.decode(kept(f"a{handle}", handle).record))
    new, old = starting(controller, tell_sizes, pool_bytes=10), ToldShard(controller)
    controller.adapters.sync.spread.add([1, 2])
    assert [queue.acquire(1, number, [f"a{number}"]) for number in (1, 2)] == [[1], [2]]
    with ThreadPoolExecutor(1) as thread:
        resized = resizing(controller, thread)
        until(lambda: controller.resize.status().state == "crowded", "the new shards are up, and it does not fit")
        assert layouts.current() == PlacedLayout("ep1-pp1", 1)
        controller.adapters.admission.release(1, [2])
        assert resized.result(HANG_SECONDS).generation == 2
    assert layouts.current() == PlacedLayout("ep2-pp1", 2)
    controller.adapters.sync.sizes.forget(1)
    queue.restore(1, [2])
    with pytest.raises(ConfigError, match=r"ep1-pp2, in which there is no place for a1, a2: 12 bytes are needed"):
        controller.resize.run("ep1-pp2", 1)
    assert layouts.current() == PlacedLayout("ep2-pp1", 2) and controller.agreement.generation == 2
    for shard in (old, *new):
        shard.close()


def test_an_old_shard_that_restarts_while_clients_move_serves_those_that_have_not():
    controller = make_controller(resize=OFFERED, timings=SOON)
    new, digest, old = starting(controller), controller.agreement.digest(), ToldShard(controller)
    adopt(controller, 1)
    beat(controller, 1, generation=1)
    with ThreadPoolExecutor(1) as thread:
        resized = resizing(controller, thread)
        until(lambda: controller.resize.status().state == "moving", "the new shards serve")
        old.close()
        controller.arrivals.depart(old.handle)
        again = ToldShard(controller, generation=1, agreement_digest=digest)
        until(lambda: any(one.kept.grant.client == 1 for one in again.memory.reports(lambda _: 0)), "it has the client")
        beat(controller, 1, generation=2)
        assert (resized.result(HANG_SECONDS).moved, resized.result().ended) == (1, 0)
    with pytest.raises(LeaseError, match="placement generation 1, expected 2"):
        ToldShard(controller, generation=1, agreement_digest=digest)
    for shard in (again, *new):
        shard.close()


class MovingTwins:
    """A controller of twins that is resized to ep2-pp1. The new shards serve; clients 1 and 2 go by the old ones."""

    def __init__(self, thread, patience=HANG_SECONDS):
        timings = Timings(shard_poll=0.001, resize_warm=patience)
        self.controller = make_controller(replicas=2, resize=OFFERED, timings=timings)
        self.new = starting(self.controller)
        self.old = [ToldShard(self.controller, shard=shard) for shard in range(2)]
        self.leases = self.controller.clients.leases
        adopt(self.controller, 1, 2)
        for client in (1, 2):
            beat(self.controller, client, generation=1)
        self.lose_connection(self.old[0])
        self.resized = resizing(self.controller, thread)
        until(lambda: self.controller.resize.status().state == "moving", "the new shards serve")

    def offered(self, client=1):
        """The shards that a client may move to."""
        move = self.controller.resize.move_for(proof(client), 1)
        return None if move is None else [one.shard for one in move.endpoints]

    def lose_connection(self, shard):
        self.controller.clients.gone(shard.handle, 1, 1)

    def end(self):
        """Let the clients move."""
        for client in (1, 2):
            beat(self.controller, client, generation=2)
        assert self.resized.result(HANG_SECONDS).moved == 2 and self.controller.agreement.layout.replicas == 2


@pytest.fixture
def twins(request):
    with ThreadPoolExecutor(1) as thread:
        twins = MovingTwins(thread, getattr(request, "param", HANG_SECONDS))
        yield twins
        twins.controller.shards.close()  # so that a resize that still runs ends
        for shard in (*twins.old, *twins.new):
            shard.close()


def test_a_client_moves_to_one_of_twins_and_what_it_lost_before_counts_no_more(twins):
    def lose(number):
        twins.new[number].close()
        twins.controller.arrivals.depart(twins.new[number].handle)

    assert twins.offered() == [0, 1, 2, 3]
    lose(0)
    assert twins.offered() == [1, 2, 3]
    lose(2)
    assert twins.offered() is None
    twins.new[0] = new_shard(twins.controller, 0)
    assert twins.offered() == [0, 1, 3]
    twins.end()
    twins.new[2] = new_shard(twins.controller, 2)
    twins.lose_connection(twins.old[0])  # it was on its way when the new shards began to serve
    twins.lose_connection(twins.new[2])
    assert twins.leases.find(1, 1), "it has a connection to shard 0, whose number another shard had before"
    twins.lose_connection(twins.new[0])
    assert twins.leases.find(1, 1) is None


@pytest.fixture
def report(twins):
    """A function: a new shard reports what it has of adapter 7, which client 1 holds; returns where both may move."""
    controller, record = twins.controller, Record.decode(kept("held", 7).record)
    controller.adapters.catalog.publish(record)
    for command in controller.adapters.sync.load(record):
        assert command.finished.wait(HANG_SECONDS)
    old = controller.adapters.sync.other
    until(lambda: old.state(7) == controller.adapters.sync.state(7) == "ready", "all shards have it")
    controller.adapters.admission.holds.acquire(1, [7])
    controller.adapters.admission.queue.update()

    def report(number, **fields):
        moved(controller, twins.new[number].handle, [pb.Residency(handle=7, **fields)])
        return twins.offered(1), twins.offered(2)

    return report


ALL = [0, 1, 2, 3]


def test_a_client_moves_to_the_twins_that_have_what_it_holds_or_borrows_and_stays_while_none_has(twins, report):
    assert report(0) == ([1, 2, 3], [1, 2, 3]), "client 2 holds nothing, so it may borrow"
    twins.controller.adapters.admission.holds.acquire(2, [8])
    assert report(0) == ([1, 2, 3], ALL), "it holds another"
    twins.controller.clients.borrow(proof(2), proof(1))
    assert report(0, layers=1) == ([1, 2, 3], [1, 2, 3])
    assert report(2) == (None, None), "the old shards have it"
    assert report(2, layers=SPEC.layers) == ([1, 2, 3], [1, 2, 3])
    assert report(2, error="no memory") == (ALL, ALL), "nothing comes of waiting"
    assert report(2) == (None, None)
    for shard in twins.old:
        moved(twins.controller, shard.handle, [pb.Residency(handle=7)])
    assert twins.offered() == ALL, "neither have the old ones"
    twins.end()


@pytest.mark.parametrize("twins", [0.0], indirect=True)
def test_a_client_moves_in_the_end_whatever_it_holds(twins, report):
    assert report(0) == ([1, 2, 3], [1, 2, 3])
    assert report(2) == (ALL, ALL)
    twins.end()


def test_new_twins_need_pools_of_one_size():
    controller = make_controller(replicas=2, resize=OFFERED, timings=SOON)
    controller.start.registered.set()
    old = [ToldShard(controller, shard=shard, pool_bytes=10) for shard in range(2)]
    found, new = [], []

    def start():
        if 2 in controller.nodes.layouts and not found:
            digest = controller.arrivals.other.digest()
            new.append(new_shard(controller, 0, pool_bytes=20, agreement_digest=digest))
            with pytest.raises(ConfigError, match=r"shard 2 .* of 30 bytes, expected 20, .*shard 0") as error:
                new.append(new_shard(controller, 2, pool_bytes=30, agreement_digest=digest))
            found.append(error)

    controller.nodes.connect(0, start)
    with pytest.raises(ServerUnavailableError, match="not ready within 1 s"):
        controller.resize.run("ep2-pp1", 1)
    assert found
    for shard in (*old, *new):
        shard.close()


def test_a_link_to_a_new_shard_that_ends_before_its_client_moved_ends_no_lease():
    controller = make_controller(restarted=True)
    leases, controller.shards.generation = controller.clients.leases, 2
    shard = ShardHandle(registration(0, generation=2))
    adopt(controller, 1, 2)
    for client in (1, 2):
        beat(controller, client, generation=client)
        controller.clients.gone(shard, client, 1)
    assert [one.client for one, _ in leases.silences()] == [1], "it tries again; the other one's shards are gone"


# -- the generation of a placement


def of_generation(generation):
    controller = Controller(replace(make_controller().agreement, generation=generation))
    assert controller.agreement.placement.generation == generation
    return controller


def test_shards_clients_and_operators_are_told_the_generation():
    controller, memory = of_generation(2), Kept()
    shard = ToldShard(controller, memory)
    lease, _ = controller.clients.join("engine")
    assert memory.claim.generation == 2 and memory.grants[lease.client].generation == 2
    assert status(controller).generation == 2
    shard.close()


def test_a_claim_of_another_generation_is_refused():
    memory = Kept()
    ToldShard(of_generation(2), memory).close()
    with pytest.raises(LeaseError, match="got a claim of placement generation 2, expected 1"):
        ToldShard(of_generation(1), memory)
    ToldShard(of_generation(2), memory).close()
    ToldShard(of_generation(1), Kept()).close()


def test_a_restart_serves_the_layout_of_the_last_resize_unless_its_flag_has_changed(database):
    layouts = Layouts(database, "10.0.0.1:7400", "ep2-pp1")
    assert layouts.current() == PlacedLayout("ep2-pp1", 1)
    layouts.put(PlacedLayout("ep2-pp2", 2))
    layouts.put(PlacedLayout("ep1-pp2", 3))
    assert Layouts(database, "10.0.0.1:7500", "ep2-pp1").current() == ("ep1-pp2", 3)
    assert Layouts(database, "10.0.0.1:7400", "ep4-pp1").current() == ("ep4-pp1", 1)
