"""A controller that was restarted learns everything from its shards, in whatever order they come."""

from pathlib import Path

import msgspec
import pytest

from lora_server.control.adapters.refusals import Refusal, Refusals
from lora_server.control.adapters.registry import FIRST_HANDLE
from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.shards import ShardHandle
from lora_server.daemon.kept import Kept
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.placement import Layout
from lora_server.transport.session import Proof
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import ToldShard, kept, make_controller, registration
from tests.support.serving import until
from tests.support.workload import spec_of


def test_a_restarted_controller_learns_everything_from_its_shards():
    controller = make_controller("ep2-pp1", settled=False)
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        controller.adapters.get("law")
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        controller.clients.renew(Proof(3, 9, b"k"))
    grant = pb.Grant(client=3, epoch=9, key=b"k", instance="engine", served_names=["base"])
    law, old = kept("law", 5), kept("old", 4, listed=False)
    state = {"run": "abc", "epoch": 2, "registered": True}
    first = controller.arrivals.arrive(
        registration(0, **state), [pb.Kept(load=law, layers=3), pb.Kept(load=old), pb.Kept(grant=grant)]
    )
    assert not controller.arrivals.settled.is_set()
    controller.arrivals.arrive(registration(1, **state), [pb.Kept(load=law), pb.Kept(grant=grant)])
    assert controller.arrivals.settled.is_set() and controller.arrivals.run == "abc"
    assert controller.adapters.registered.is_set()
    assert [(one.record.name, one.state) for one in controller.adapters.listings()] == [
        ("law", "loading"),
        ("old", "draining"),
    ]
    proof = Proof(3, 9, b"k")
    assert controller.clients.heartbeat(proof), "the client is asked what it holds"
    assert controller.clients.leases.serving("base") == "engine"
    controller.clients.restore(proof, [4])
    assert controller.adapters.get("law").record.handle == 5
    controller.clients.release(proof, [4])
    assert [one.record.name for one in controller.adapters.listings()] == ["law"], "what drained is gone"
    assert [command.drop for command in drained(first) if command.HasField("drop")] == [4]
    assert controller.clients.leases.grant("new").client == 4, "ids are not used twice"


def drained(handle):
    """The commands that a handle was given so far."""
    handle.close()
    return list(handle.commands())


def test_what_only_one_shard_knew_reaches_the_others():
    """The controller was killed in the middle of an add: one shard was told, the other comes first."""
    controller = make_controller("ep2-pp1", settled=False)
    first = controller.arrivals.arrive(registration(0, run="abc", epoch=1), [])
    controller.arrivals.arrive(registration(1, run="abc", epoch=1), [pb.Kept(load=kept("law", 5))])
    assert [command.load.handle for command in drained(first) if command.HasField("load")] == [5]


def test_a_pin_that_one_shard_was_away_for_is_told_to_it():
    for first in (0, 1):
        controller = make_controller("ep2-pp1", settled=False)
        handles = {}
        for shard in (first, 1 - first):
            load = kept("law", 5, pinned=shard == 0)
            handles[shard] = controller.arrivals.arrive(registration(shard, run="abc", epoch=1), [pb.Kept(load=load)])
        assert controller.adapters.get("law").record.pinned
        assert [command.load.pinned for command in drained(handles[1]) if command.HasField("load")] == [True]


def test_what_was_dropped_stays_dropped_though_one_shard_kept_it():
    """It was away when the adapter was removed; its peers say that the handle is over, before or after it."""
    for first in (0, 1):
        controller = make_controller("ep2-pp1", settled=False)
        tell = {
            0: ([pb.Kept(load=kept("law", 5))], {}),
            1: ([], {"gone": [5], "last_handle": FIRST_HANDLE + 9, "last_client": 4}),
        }
        for shard in (first, 1 - first):
            own, fields = tell[shard]
            controller.arrivals.arrive(registration(shard, run="abc", epoch=1, **fields), own)
        assert controller.adapters.listings() == []
        assert controller.adapters._registry.next_handle() == FIRST_HANDLE + 10, (
            "no handle is used twice, also of what is gone"
        )
        assert controller.clients.leases.grant("new").client == 5


@pytest.mark.parametrize("late", [0, 1])
def test_of_two_versions_under_a_name_the_later_one_is_listed(late):
    """A shard was away while one was removed and the other added: it still thinks that the first is listed."""
    controller = make_controller("ep2-pp1", settled=False)
    tell = {
        0: ([pb.Kept(load=kept("law", 5))], {}),
        1: ([pb.Kept(load=kept("law", 7, version="v2"))], {"gone": [5], "last_handle": 7}),
    }
    for shard in (1 - late, late):
        own, fields = tell[shard]
        controller.arrivals.arrive(registration(shard, run="abc", epoch=1, **fields), own)
    assert [(one.record.handle, one.state) for one in controller.adapters.listings()] == [(7, "loading")]


def test_nobody_joins_or_adds_before_all_shards_have_spoken(tiny_adapters):
    controller = make_controller(settled=False)
    controller.shards.arrive(ShardHandle(registration(0)), False)  # its state is still being read
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        controller.clients.join("early")
    tiny = Controller(Agreement(spec_of("mixtral"), Layout(1, 1), "float32", "independent", 64))
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        tiny.adapters.register("law", str(tiny_adapters["all"]))


def test_a_directory_is_listed_anew_by_a_node_that_was_started_anew(tiny_adapters):
    """Unlike by a controller that its node restarted: other content under a name is refused, and said."""
    controller = Controller(Agreement(spec_of("mixtral"), Layout(1, 1), "float32", "independent", 64))
    digest = controller.agreement.digest()
    told = registration(0, run="abc", epoch=1, registered=True, agreement=digest)
    controller.arrivals.arrive(told, [pb.Kept(load=kept("law", 5))])
    assert not controller.adapters.registered.is_set()
    controller.adapters.register_directory({"law": tiny_adapters["all"], "new": tiny_adapters["down"]})
    assert [one.record.name for one in controller.adapters.listings()] == ["law", "new"]
    (refusal,) = controller.adapters.refused()
    assert (refusal.name, refusal.code) == ("law", "adapter_exists")
    assert "is served under this name" in refusal.reason
    assert controller.adapters.remove("law") == 0 and controller.adapters.refused() == []
    assert [one.record.name for one in controller.adapters.listings()] == ["new"]


def test_kept_state_that_cannot_be_read_turns_a_shard_away_and_harms_nobody():
    controller = make_controller("ep2-pp1", settled=False)
    with pytest.raises(ConfigError, match="shard 0: what it kept cannot be read"):
        controller.arrivals.arrive(registration(0, run="abc", epoch=1), [pb.Kept(load=pb.Load(handle=1, record=b"{}"))])
    assert controller.shards.missing() == [0, 1]


def test_state_of_another_run_is_dropped_by_the_shard_that_kept_it():
    controller = make_controller("ep2-pp1", settled=False)
    controller.arrivals.arrive(registration(0, run="abc", epoch=1), [pb.Kept(load=kept("law", 5))])
    other = controller.arrivals.arrive(registration(1, run="xyz", epoch=1), [pb.Kept(load=kept("art", 6))])
    assert [one.record.name for one in controller.adapters.listings()] == ["law"]
    claims = [command.claim for command in drained(other) if command.HasField("claim")]
    assert claims[0].run == claims[-1].run == "abc"
    memory = Kept()
    memory.note(pb.ShardCommand(claim=pb.Claim(epoch=1, run="xyz")))
    memory.note(pb.ShardCommand(load=kept("art", 6)))
    assert memory.is_foreign(claims[-1]) and not memory.is_foreign(pb.Claim(epoch=1))
    assert memory.forget() == ([6], []) and memory.count() == 0


def test_what_was_dropped_while_a_shard_was_away_is_dropped_there_too():
    controller = make_controller()
    controller.arrivals.run = "abc"
    grant = pb.Grant(client=3, epoch=9, key=b"k")
    came = controller.arrivals.arrive(
        registration(0, run="abc", epoch=1, agreement=controller.agreement.digest()),
        [pb.Kept(load=kept("gone", 5)), pb.Kept(grant=grant)],
    )
    commands = drained(came)
    assert [c.drop for c in commands if c.HasField("drop")] == [5]
    assert [c.revoke for c in commands if c.HasField("revoke")] == [3]


def refusals(*names, serial):
    told = [Refusal(name, "/x", "adapter_format", "DoRA") for name in names]
    return pb.Refusals(refusals=msgspec.json.encode(told), serial=serial)


def test_a_refusal_that_one_shard_saw_taken_back_stays_taken_back():
    """The other was away when the adapter was removed; a third was never told of any."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        controller = make_controller("ep3-pp1", settled=False)
        tell = {
            0: {"refused": refusals("dora", "pickle", serial=1)},
            1: {"refused": refusals("pickle", serial=2)},
            2: {},
        }
        for shard in order:
            told = {"registered": shard != 2, "agreement": controller.agreement.digest()} | tell[shard]
            controller.arrivals.arrive(registration(shard, run="abc", epoch=1, **told), [])
        assert [one.name for one in controller.adapters.refused()] == ["pickle"]
        controller.adapters.register_directory({"pickle": Path("/nowhere")})
        assert controller.not_ready() == "", "nothing is listed again"


def test_what_shards_keep_of_refusals_reaches_the_next_controller():
    memory = Kept()
    assert not memory.sign(pb.Registration()).HasField("refused")
    kept = Refusals()
    kept.put(Refusal("dora", "/x", "adapter_format", "DoRA", "stamp", True))
    memory.note(pb.ShardCommand(refused=refusals("pickle", serial=1)))
    memory.note(pb.ShardCommand(refused=kept.tell()))
    successor = Refusals()
    successor.adopt(memory.sign(pb.Registration()).refused)
    assert successor.all() == kept.all()


@pytest.mark.parametrize("require_all", [False, True])
def test_a_refused_adapter_makes_a_server_unready_only_where_all_are_required(tmp_path, tiny_adapters, require_all):
    agreement = Agreement(spec_of("mixtral"), Layout(1, 1), "float32", "independent", 64)
    controller = Controller(agreement, require_all_adapters=require_all)
    controller.arrivals.arrive(registration(0, agreement=agreement.digest()), [])
    assert controller.not_ready() == "registering adapters"
    (tmp_path / "dora").mkdir()
    controller.adapters.register_directory({"law": tiny_adapters["all"], "dora": tmp_path / "dora"})
    assert ("adapter 'dora' was refused: " in controller.not_ready()) == require_all
    controller.adapters.register("dora", str(tiny_adapters["down"]))
    assert controller.not_ready() == "" and controller.adapters.refused() == []


def test_a_restarted_shard_is_told_what_adapters_took_of_it():
    controller = make_controller(settled=False)
    first = ToldShard(controller)
    controller.adapters.adopt([kept("law", 1), kept("code", 2)], [], 2)
    controller.adapters.on_moved(0, [pb.Residency(handle=1, bytes=4096, measured=True), pb.Residency(handle=2)])
    first.close()
    controller.shards.depart(first.handle)
    second = ToldShard(controller, pid=2)
    until(lambda: len(second.memory.loads) == 2, "it is told of both")
    loads = second.memory.loads
    assert (loads[1].HasField("size"), loads[1].size, loads[2].HasField("size")) == (True, 4096, False)
    second.close()
