"""A controller that was restarted learns everything from its shards, and goes on with a drain."""

from pathlib import Path

import msgspec
import pytest

from lora_server.control.adapters.records import FIRST_HANDLE
from lora_server.control.adapters.refusals import RefusedAdapter, RefusedAdapters
from lora_server.control.members.leases import EngineTraits
from lora_server.control.members.shards import ShardHandle
from lora_server.daemon.kept import Kept
from lora_server.errors import ConfigError, ServerUnavailableError, UnknownAdapterError
from lora_server.slo import SloClasses
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Proof
from tests.support.controllers import (
    ToldShard,
    drained,
    kept,
    make_controller,
    make_tiny_controller,
    moved,
    registration,
)
from tests.support.killed_controller import part_of
from tests.support.restarts import SECONDS, Killed, Server, dies
from tests.support.serving import until


def loads(handle):
    return [command.load for command in drained(handle) if command.HasField("load")]


def arrive(controller, shard, *told, **fields):
    """Register a shard of the same run, which kept these."""
    fields = {"run": "abc", "epoch": 1, "agreement_digest": controller.agreement.digest()} | fields
    return controller.arrivals.arrive(registration(shard, **fields), told)


def test_a_restarted_controller_learns_everything_from_its_shards():
    controller, proof = make_controller("ep2-pp1", settled=False), Proof(3, 9, b"k")
    for refused in (lambda: controller.adapters.listings.get("law"), lambda: controller.clients.renew(proof)):
        with pytest.raises(ServerUnavailableError, match="waits for its shards"):
            refused()
    grant = pb.Grant(client=3, epoch=9, key=b"k", instance="engine", served_names=["base"])
    law, old = kept("law", 5), kept("old", 4, listed=False)
    state = {"epoch": 2, "registered": True}
    first = arrive(controller, 0, pb.Kept(load=law, layers=3), pb.Kept(load=old), pb.Kept(grant=grant), **state)
    assert not controller.start.settled.is_set()
    arrive(controller, 1, pb.Kept(load=law), pb.Kept(grant=grant), **state)
    assert controller.start.settled.is_set() and controller.arrivals.run == "abc"
    assert controller.start.registered.is_set()
    states = {one.record.name: one.state for one in controller.adapters.listings.all()}
    assert states == {"law": "loading", "old": "draining"}
    assert controller.clients.heartbeat(proof), "the client is asked what it holds"
    assert controller.clients.leases.serving("base") == "engine"
    controller.requests.restore(proof, [4])
    assert controller.adapters.listings.get("law").record.handle == 5
    controller.requests.release(proof, [4])
    assert [one.record.name for one in controller.adapters.listings.all()] == ["law"], "what drained is gone"
    assert [command.drop for command in drained(first) if command.HasField("drop")] == [4]
    assert controller.clients.leases.grant("new").client == 4, "ids are not used twice"


LAW = pb.Kept(load=kept("law", 5))
V2 = pb.Kept(load=kept("law", 7, version="v2"))
REMOVED = {"gone": [5], "last_handle": FIRST_HANDLE + 9, "last_client": 4}
KEPT_APART = {  # what shards 0 and 1 kept; the listed handle, and which loads a shard is sent
    "an add that shard 1 did not hear": (LAW, None, {}, [5], {1: [(5, False)]}),
    "a pin that shard 1 did not hear": (pb.Kept(load=kept("law", 5, pinned=True)), LAW, {}, [5], {1: [(5, True)]}),
    "a version that shard 0 did not hear": (LAW, V2, {"gone": [5], "last_handle": 7}, [7], {0: [(7, False)]}),
    "a removal that shard 0 did not hear": (LAW, None, REMOVED, [], {}),
}


@pytest.mark.parametrize("case", KEPT_APART)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_shard_is_told_the_changes_that_it_missed(case, order):
    """The later word counts, in whatever order they arrive; no handle or client number is used twice."""
    first, second, fields, listed, sent = KEPT_APART[case]
    controller, told = make_controller("ep2-pp1", settled=False), [(first, {}), (second, fields)]
    handles = {one: arrive(controller, one, *filter(None, told[one][:1]), **told[one][1]) for one in order}
    assert [one.record.handle for one in controller.adapters.listings.all()] == listed
    for one, needed in sent.items():
        assert [(load.handle, load.pinned) for load in loads(handles[one])] == needed
    if not listed:
        assert controller.adapters.catalog.ledger.next_handle() == FIRST_HANDLE + 10
        assert controller.clients.leases.grant("new").client == 5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_client_whose_connection_ended_while_no_controller_ran_holds_nothing(order):
    """Shard 0 saw it end; shard 1 keeps its grant, whichever of them registers first."""
    gone, memory = pb.ClientGone(client=3, epoch=9), Kept()
    for client in (3, 4):
        memory.note(pb.ShardCommand(grant=pb.Grant(client=client, epoch=9, key=b"k")))
    memory.end(pb.ClientGone(client=4, epoch=8))
    memory.end(gone)
    *reports, last = memory.reports(lambda handle: 0)
    assert last.client_gone == gone and len(reports) == memory.count() == 2
    controller, handles = make_controller("ep2-pp1", settled=False), {}
    for shard in order:
        handles[shard] = arrive(controller, shard, *(one.kept for one in reports), last_client=4, active=[5])
        if shard == 0:
            controller.clients.end(gone.client, gone.epoch)
    assert controller.start.settled.is_set()
    assert [lease.client for lease, _ in controller.clients.leases.silences()] == [4]
    assert not controller.adapters.admission.holds.is_unknown(3) and controller.adapters.admission.holds.is_unknown(4)
    assert all(3 in [one.revoke for one in drained(handle)] for handle in handles.values()), "nor may it push"
    memory.note(pb.ShardCommand(revoke=3))
    assert len(list(memory.reports(lambda handle: 0))) == memory.count() == 1


def test_a_restarted_node_lists_its_directory_again(tiny_adapters):
    """Unlike by a controller that its node restarted: other content under a name is refused, and said."""
    controller = make_tiny_controller()
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        controller.adapters.rollout.register("law", str(tiny_adapters["all"]))
    memory = Kept()
    memory.note(pb.ShardCommand(claim=pb.Claim(epoch=1, run="abc")))
    memory.note(pb.ShardCommand(load=kept("law", 5)))
    shard = ToldShard(controller, memory, registered=True)
    assert not controller.start.registered.is_set()
    controller.adapters.directory.register({"law": tiny_adapters["all"], "new": tiny_adapters["down"]})
    assert [one.record.name for one in controller.adapters.listings.all()] == ["law", "new"]
    (refusal,) = controller.adapters.catalog.refusals.listed()
    assert (refusal.name, refusal.code) == ("law", "adapter_exists")
    assert "is served under this name" in refusal.reason
    assert controller.adapters.rollout.remove("law") == 0 and controller.adapters.catalog.refusals.listed() == []
    assert [one.record.name for one in controller.adapters.listings.all()] == ["new"]
    shard.close()


def test_a_shard_whose_kept_state_cannot_be_read_is_refused():
    controller = make_controller("ep2-pp1", settled=False)
    with pytest.raises(ConfigError, match="shard 0: what it kept cannot be read"):
        arrive(controller, 0, pb.Kept(load=pb.Load(handle=1, record=b"{}")))
    assert controller.shards.missing() == [0, 1]


def test_a_shard_drops_what_it_kept_of_another_run():
    controller = make_controller("ep2-pp1", settled=False)
    arrive(controller, 0, LAW)
    other = arrive(controller, 1, pb.Kept(load=kept("art", 6)), run="xyz")
    assert [one.record.name for one in controller.adapters.listings.all()] == ["law"]
    claims = [command.claim for command in drained(other) if command.HasField("claim")]
    assert claims[0].run == claims[-1].run == "abc"
    memory = Kept()
    memory.note(pb.ShardCommand(claim=pb.Claim(epoch=1, run="xyz")))
    memory.note(pb.ShardCommand(load=kept("art", 6)))
    assert memory.is_foreign(claims[-1]) and not memory.is_foreign(pb.Claim(epoch=1))
    assert memory.forget() == ([6], []) and memory.count() == 0


def test_a_returning_shard_drops_what_was_dropped_meanwhile():
    controller = make_controller()
    controller.arrivals.run = "abc"
    grant = pb.Grant(client=3, epoch=9, key=b"k")
    commands = drained(arrive(controller, 0, LAW, pb.Kept(grant=grant)))
    assert [c.drop for c in commands if c.HasField("drop")] == [5]
    assert [c.revoke for c in commands if c.HasField("revoke")] == [3]


def refusals(*names, serial):
    told = [RefusedAdapter(name, "/x", "adapter_format", "DoRA") for name in names]
    return pb.Refusals(refusals=msgspec.json.encode(told), serial=serial)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_refusal_that_one_shard_saw_taken_back_stays_taken_back(order):
    """The other was away when the adapter was removed; a third was never told of any."""
    controller = make_controller("ep3-pp1", settled=False)
    told = [refusals("dora", "pickle", serial=1), refusals("pickle", serial=2), None]
    for shard in order:
        arrive(controller, shard, registered=shard != 2, refused=told[shard])
    assert [one.name for one in controller.adapters.catalog.refusals.listed()] == ["pickle"]
    controller.adapters.directory.register({"pickle": Path("/nowhere")})
    assert controller.not_ready() == "", "nothing is listed again"


def test_refusals_that_shards_keep_reach_the_next_controller():
    memory = Kept()
    assert not memory.sign(pb.Registration()).HasField("refused")
    kept = RefusedAdapters()
    kept.put(RefusedAdapter("dora", "/x", "adapter_format", "DoRA", "stamp", True))
    memory.note(pb.ShardCommand(refused=refusals("pickle", serial=1)))
    memory.note(pb.ShardCommand(refused=kept.tell()))
    successor = RefusedAdapters()
    successor.adopt(memory.sign(pb.Registration()).refused)
    assert successor.all() == kept.all()


def test_a_restarted_shard_is_told_the_sizes_of_its_adapters():
    controller = make_controller(settled=False)
    first = ToldShard(controller)
    controller.adapters.recovery.adopt([kept("law", 1), kept("code", 2)], [], 2)
    controller.adapters.sync.settle()
    moved(controller, first.handle, [pb.Residency(handle=1, bytes=4096, measured=True), pb.Residency(handle=2)])
    first.close()
    controller.shards.depart(first.handle)
    second = ToldShard(controller, pid=2)
    until(lambda: len(second.memory.loads) == 2, "it is told of both")
    told = second.memory.loads
    assert (told[1].HasField("size"), told[1].size, told[2].HasField("size")) == (True, 4096, False)
    second.close()


@pytest.fixture
def server(tmp_path, tiny_adapters):
    one = Server(tmp_path, tiny_adapters)
    yield one
    one.close()


def add_of_directory(server):
    server.adapters.directory.register({"law": server.paths["all"]})
    server.controller.arrivals.announce()


def add(server):
    server.adapters.rollout.add("law", str(server.paths["all"]), SECONDS)


def hold(server, came=add):
    """Have a client acquire the adapter `law`; the next controller does not know that before the client says so."""
    came(server)
    lease, _ = server.controller.clients.join("engine")
    (record,) = server.adapters.admission.acquire(lease.client, ["law"]).records
    return lease.client, [record.handle]


def states(server):
    return {one.record.version[:8]: one.state for one in server.adapters.listings.all()}


def cut_off_in_time(server):
    def gone():
        server.adapters.admission.cut_off()
        return "draining" not in states(server).values()

    until(gone, "whoever holds it still is cut off", SECONDS)


def remove(server, seconds):
    server.adapters.rollout.remove("law", seconds)


def update(server, seconds):
    server.adapters.rollout.update("law", str(server.paths["down"]), SECONDS, seconds)


@pytest.mark.parametrize("came", [add, add_of_directory])
@pytest.mark.parametrize("goes", [remove, update])
def test_a_deadline_outlives_the_controller(server, came, goes):
    client, handles = hold(server, came)
    goes(server, 0.05)
    server.kill()
    cut_off_in_time(server)
    server.adapters.admission.restore(client, handles)
    held = server.adapters.admission.holds.of(client, handles)
    assert not held, "it was cut off before the controller knew that it held it"
    until(lambda: len(server.shard.memory.loads) == len(states(server)) == (goes is update), "shards drop it", SECONDS)


@pytest.mark.parametrize("goes", [remove, update])
def test_an_engine_keeps_the_version_in_its_weights_past_the_deadline_and_the_controller(server, goes):
    add(server)
    record = server.adapters.listings.get("law").record
    versions = EngineTraits(merged=record.version), EngineTraits(merged="")
    joined = [server.controller.clients.join("engine", traits)[0] for traits in versions]
    engine, other = (lease.client for lease in joined)

    def holders():
        server.adapters.admission.cut_off()
        return list(server.adapters.admission.holds.by_client(record.handle))

    for client in (engine, other):
        server.adapters.admission.acquire(client, ["law"])
    goes(server, 0.0)
    assert holders() == [engine]
    server.kill()
    assert holders() == [] and "draining" in states(server).values(), "the engine has not said what it holds"
    for client in (other, engine):
        server.adapters.admission.restore(client, [record.handle])
    assert holders() == [engine]
    server.controller.clients.end(engine, joined[0].epoch)
    assert "draining" not in states(server).values(), "it went with the engine"


def test_a_hold_is_not_cut_off_before_its_deadline(server):
    client, handles = hold(server)
    server.adapters.rollout.remove("law", 3600.0)
    server.kill()
    server.adapters.admission.cut_off()
    assert list(states(server).values()) == ["draining"]
    server.adapters.admission.restore(client, handles)
    assert server.adapters.listings.held(client) == ["law"]
    server.adapters.admission.release(client, handles)
    assert not states(server)


@pytest.mark.parametrize(
    ("method", "seconds", "removed"),
    [("changes.unlist", 0.05, True), ("catalog.ledger.removed", 0.0, False)],
    ids=["told", "stored"],
)
def test_a_controller_that_is_killed_in_a_removal_did_all_or_nothing(server, monkeypatch, method, seconds, removed):
    """Before its shards are told, and before it is stored: then the deadline means nothing."""
    hold(server)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, *part_of(server.adapters, method), False)
        server.adapters.rollout.remove("law", seconds)
    server.kill()
    if removed:
        cut_off_in_time(server)
        with pytest.raises(UnknownAdapterError):
            server.adapters.listings.get("law")
    else:
        server.adapters.admission.cut_off()
        assert list(states(server).values()) == ["ready"]


def test_a_draining_server_goes_on_draining_under_the_next_controller(server):
    client, handles = hold(server)
    assert server.controller.drain.begin(0) == 1
    server.kill()
    assert server.controller.not_ready() == "draining"
    with pytest.raises(ServerUnavailableError, match="draining"):
        server.controller.clients.join("another")
    server.adapters.admission.restore(client, handles)
    assert server.adapters.admission.acquire(client, ["law"], ticket=1)[1].reason == "draining"
    assert server.controller.drain.begin(0) == 1, "and whoever asks is told how far it is"
    server.controller.drain.resume()
    assert server.adapters.admission.acquire(client, ["law"], ticket=1)[1] is None
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


GOLD = SloClasses.parse({"gold": {"slo": "ttft_p99=1s,tpot_avg=1s"}})


def test_an_adapter_keeps_its_class_over_versions_and_restarts(tmp_path):
    """On the shard, and in the ledger, which a server reads whose shards have nothing of before."""
    server = Server(tmp_path, classes=GOLD)
    first, second = map(str, list(server.paths.values())[:2])

    def classes():
        return {one.record.name: one.slo_class for one in server.adapters.listings.all() if one.state != "draining"}

    rollout = server.adapters.rollout
    with pytest.raises(ConfigError, match=r"SLO class: got 'brass', expected one of the server's --classes \(gold\)"):
        rollout.add("law", first, SECONDS, slo_class="brass")
    rollout.add("law", first, SECONDS, slo_class="gold")
    rollout.add("code", first, SECONDS)
    rollout.add("law", first, SECONDS)
    rollout.add("code", first, SECONDS, slo_class="gold")
    rollout.update("law", second, SECONDS)
    assert server.adapters.admission.classes.of(["law"]).name == "gold"
    server.kill()
    assert classes() == {"law": "gold", "code": "gold"}
    server.shard.memory.__init__()
    server.kill()
    assert classes() == {"law": "gold", "code": "gold"}
    server.adapters.rollout.add("code", first, SECONDS, slo_class="")
    server.adapters.directory.register({"new": Path(first)})
    with pytest.raises(ConfigError, match="comes from --adapters, got SLO class 'gold'; name it in the file"):
        server.adapters.rollout.add("new", first, SECONDS, slo_class="gold")
    assert classes() == {"law": "gold", "code": "", "new": ""}
    server.close()
