"""Leases, registry and the prefetch channel of the control plane."""

import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lora_server import spec
from lora_server.control.agreement import Agreement
from lora_server.control.controller import Controller
from lora_server.control.leases import Leases
from lora_server.control.prefetch import PrefetchListener
from lora_server.control.registry import Record, Registry, check_name
from lora_server.control.shards import ShardHandle, ShardTable, wait_all
from lora_server.daemon.kept import Kept
from lora_server.errors import (
    AdapterExistsError,
    AdapterFormatError,
    ConfigError,
    LeaseError,
    ServerUnavailableError,
    ShardUnavailableError,
    UnknownAdapterError,
)
from lora_server.placement import Layout
from lora_server.spec import Invocation, Site
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import messages
from tests.serving import until
from tests.workload import spec_of

SPEC = spec.load("mixtral-8x7b")


def make_controller(layout="ep1-pp1", settled=True, restarted=True):
    agreement = Agreement(SPEC, Layout.parse(layout), "float32", "independent", 64)
    controller = Controller(agreement, restarted=restarted)
    if settled:
        controller.arrivals.settled.set()
    return controller


def kept(name, handle, version="v1", listed=True):
    """An adapter as a shard keeps it."""
    record = Record(
        handle=handle,
        name=name,
        version=version,
        path="/x",
        stamp="",
        lora_rank=4,
        nbytes=1,
        sites=(Site(0, "qkv"),),
        warnings=("careful",),
        invocation=Invocation((1, 2)),
    )
    return pb.Load(handle=handle, path="/x", version=version, record=record.encode(), listed=listed)


def test_a_record_survives_its_journey():
    record = Record.decode(kept("law", 7).record)
    assert (record.sites, record.invocation, record.warnings) == ((Site(0, "qkv"),), Invocation((1, 2)), ("careful",))
    assert Record.decode(record.encode()) == record


def test_a_name_that_is_taken_by_another_version_is_refused():
    registry = Registry()
    registry.add(Record.decode(kept("law", 1).record))
    assert registry.existing("law", "v1").handle == 1 and registry.existing("code", "v1") is None
    with pytest.raises(AdapterExistsError, match="remove it first"):
        registry.existing("law", "v2")
    assert registry.next_handle() == 2, "handles are never used twice"


NAMES, CLIENTS = st.sampled_from(["law", "code", "art"]), st.integers(1, 3)


class AdaptersMachine(RuleBasedStateMachine):
    """Against the obvious model: holds, listed names, handles that exist while needed, clients yet to speak."""

    @initialize()
    def start(self):
        self.adapters = make_controller().adapters
        self.listed, self.holds, self.alive, self.silent, self.next = {}, [], set(), {}, 1

    @rule(name=NAMES)
    def add(self, name):
        if name not in self.listed:
            self.adapters.adopt([kept(name, self.next)], (), 0)
            self.listed[name] = self.next
            self.alive.add(self.next)
            self.next += 1

    @rule(client=CLIENTS, names=st.lists(NAMES, max_size=3, unique=True))
    def acquire(self, client, names):
        if set(names) <= set(self.listed):
            got = [one.handle for one in self.adapters.acquire(client, names)]
            assert got == [self.listed[name] for name in names]
            self.holds += [(client, handle) for handle in got]
        else:
            with pytest.raises(UnknownAdapterError):
                self.adapters.acquire(client, names)

    @rule(client=CLIENTS)
    def release_one(self, client):
        own = [hold for hold in self.holds if hold[0] == client]
        if own:
            self.holds.remove(own[0])
            self.adapters.release(client, [own[0][1]])

    @rule(client=CLIENTS)
    def forget(self, client):
        self.holds = [hold for hold in self.holds if hold[0] != client]
        self.silent.pop(client, None)
        self.adapters.forget_client(client)

    @rule(name=NAMES)
    def remove(self, name):
        if name in self.listed:
            holders = {client for client, handle in self.holds if handle == self.listed[name]}
            del self.listed[name]
            assert self.adapters.remove(name) == len(holders)

    @rule(client=st.integers(4, 5), name=NAMES, times=st.integers(1, 2))
    def a_client_of_an_earlier_controller(self, client, name, times):
        if name in self.listed and client not in self.silent:
            self.adapters.expect(client)
            self.silent[client] = [self.listed[name]] * times

    @rule(client=st.integers(4, 5))
    def speaks(self, client):
        if client in self.silent:
            assert self.adapters.is_unknown(client)
            handles = self.silent.pop(client)
            self.adapters.restore(client, handles)
            own = [hold for hold in self.holds if hold[0] == client and hold[1] == handles[0]]
            self.holds += [(client, handles[0])] * max(0, len(handles) - len(own))

    @invariant()
    def what_is_needed_exists_and_nothing_else(self):
        needed = set(self.listed.values()) | {handle for _, handle in self.holds}
        self.alive = self.alive if self.silent else self.alive & needed
        assert {one.record.handle for one in self.adapters.listings()} == self.alive
        for one in self.adapters.listings():
            assert one.holders == len({client for client, handle in self.holds if handle == one.record.handle})
            assert (one.state == "draining") == (one.record.handle not in self.listed.values())


TestAdapters = AdaptersMachine.TestCase


def registration(shard, pid=1, **fields):
    fields = {"instance": str(pid), "agreement": make_controller("ep2-pp1").agreement.digest()} | fields
    return pb.Registration(shard=shard, pid=pid, **fields)


def test_a_restarted_controller_learns_everything_from_its_shards():
    controller = make_controller("ep2-pp1", settled=False)
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        controller.adapters.get("law")
    with pytest.raises(ServerUnavailableError, match="waits for its shards"):
        controller.clients.renew(3, 9)
    grant = pb.Grant(client=3, epoch=9, key=b"k", instance="engine")
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
    assert controller.clients.renew(3, 9), "the client is asked what it holds"
    controller.clients.restore(3, 9, [4])
    assert controller.adapters.get("law").record.handle == 5
    controller.clients.release(3, 9, [4])
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


def test_what_was_dropped_stays_dropped_though_one_shard_kept_it():
    """It was away when the adapter was removed; its peers say that the handle is over, before or after it."""
    for first in (0, 1):
        controller = make_controller("ep2-pp1", settled=False)
        tell = {0: ([pb.Kept(load=kept("law", 5))], {}), 1: ([], {"gone": [5], "last_handle": 9, "last_client": 4})}
        for shard in (first, 1 - first):
            own, fields = tell[shard]
            controller.arrivals.arrive(registration(shard, run="abc", epoch=1, **fields), own)
        assert controller.adapters.listings() == []
        assert controller.adapters._registry.next_handle() == 10, "no handle is used twice, also of what is gone"
        assert controller.clients.leases.grant("new").client == 5


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
    assert "is served under this name" in controller.adapters.refused()["law"]
    assert controller.adapters.remove("law") == 0 and controller.adapters.refused() == {}
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


@pytest.mark.parametrize("name", ["", " ", "-x", "a\nb", "x" * 201, "a b"])
def test_bad_names(name):
    with pytest.raises(AdapterFormatError, match="adapter name"):
        check_name(name)


@given(st.integers(1, 20))
def test_leases_are_unique_and_end_once(count):
    leases = Leases(seconds=60)
    granted = [leases.grant("test") for _ in range(count)]
    assert len({lease.client for lease in granted}) == len({lease.key for lease in granted}) == count
    for lease in granted:
        leases.renew(lease.client, lease.epoch)
        with pytest.raises(LeaseError, match="join again"):
            leases.renew(lease.client, lease.epoch + 1)
        assert not leases.end(lease.client, lease.epoch + 1)
        assert leases.end(lease.client, lease.epoch)
        assert not leases.end(lease.client, lease.epoch)
    assert len(leases) == 0


def test_silent_leases_expire_and_renewed_ones_do_not():
    leases = Leases(seconds=0.05)
    silent, lively = leases.grant("silent"), leases.grant("lively")
    expired = []

    def sweep():
        leases.renew(lively.client, lively.epoch)
        expired.extend(leases.take_expired())
        return expired

    until(sweep, "the silent one expires", 5)
    assert expired == [silent]


def handle_of(shard, pid=1, epoch=0):
    return ShardHandle(pb.Registration(shard=shard, pid=pid, instance=str(pid), epoch=epoch))


def test_the_table_knows_who_is_missing():
    table = ShardTable(Layout(2, 1), "independent")
    with pytest.raises(ServerUnavailableError, match=r"\[0, 1\] of ep2-pp1 are not up"):
        table.require_up()
    first = handle_of(0)
    table.arrive(first)
    with pytest.raises(ServerUnavailableError, match="pid 1 of node 0; is a node rank used twice"):
        table.arrive(handle_of(0, pid=2))
    table.arrive(handle_of(1))
    assert sorted(table.require_up()) == [0, 1]
    pending = first.send(pb.ShardCommand(drop=1))
    assert table.depart(first)
    with pytest.raises(ShardUnavailableError, match="shard 0"):
        wait_all([pending], 1, "a drop")
    assert table.missing() == [0]


def arrived(table, handle, settled=True):
    table.arrive(handle, settled)
    return handle


def test_a_rank_has_one_claimant():
    """Whoever was replaced while it was away is turned away; whoever comes back itself is welcome."""
    table = ShardTable(Layout(1, 1), "independent")
    first = arrived(table, handle_of(0, pid=1))
    again = arrived(table, handle_of(0, pid=1, epoch=first.epoch))
    assert again.epoch == first.epoch, "its old stream is still there"
    assert arrived(table, handle_of(0, pid=1)).epoch == first.epoch, "it was never told its claim"
    again = arrived(table, handle_of(0, pid=1, epoch=first.epoch))
    assert not table.depart(first) and table.live() == {0: again}
    assert table.depart(again)
    second = arrived(table, handle_of(0, pid=2))
    assert second.epoch > first.epoch and table.restarts[0] == 1
    with pytest.raises(LeaseError, match="pid 1 of node 0 was replaced"):
        table.arrive(handle_of(0, pid=1, epoch=first.epoch))


def test_a_restarted_controller_finds_the_right_claimant():
    old, new = 7, 8
    table = ShardTable(Layout(1, 1), "independent")
    orphan = arrived(table, handle_of(0, pid=1, epoch=old), settled=False)
    assert orphan.epoch == old, "a controller that knows nothing believes the first"
    pending = orphan.send(pb.ShardCommand(drop=1))
    assert arrived(table, handle_of(0, pid=2, epoch=new), settled=False).epoch == new, "until a newer one comes"
    assert isinstance(pending.error, ShardUnavailableError)
    table = ShardTable(Layout(1, 1), "independent")
    usurper = arrived(table, handle_of(0, pid=3), settled=False)
    holder = arrived(table, handle_of(0, pid=1, epoch=old), settled=False)
    assert holder.epoch > usurper.epoch, "one that had the rank goes before one that waited for it"
    with pytest.raises(LeaseError, match="pid 3"):
        table.arrive(handle_of(0, pid=3, epoch=usurper.epoch), settled=False)
    with pytest.raises(ServerUnavailableError, match="served by pid 1"):
        table.arrive(handle_of(0, pid=4), settled=True)


def test_a_leader_without_followers_is_not_up():
    table = ShardTable(Layout(2, 1), "leader")
    leader = handle_of(0)
    table.arrive(leader)
    table.arrive(handle_of(1))
    assert table.missing() == [0]
    table.update(leader, pb.ShardStats(followers=1))
    assert table.missing() == []


def test_a_command_that_is_never_answered_has_a_deadline():
    began = time.monotonic()
    with pytest.raises(ServerUnavailableError, match=r"shard 0: loading did not finish within 0\.1 s"):
        wait_all([handle_of(0).send(pb.ShardCommand(drop=1))], 0.1, "loading")
    assert time.monotonic() - began < 5


def test_bad_prefetch_messages_do_not_stop_good_ones():
    received = []
    listener = PrefetchListener("127.0.0.1", "", received.append)
    with zmq.Context.instance().socket(zmq.PUSH) as sender:
        sender.connect(listener.address)
        for bad in (
            b"",
            b"garbage",
            messages.encode(messages.Welcome(1, 2, 3)),
            b"\x82\xa4type\xa8prefetch\xa7handles\x91\xff",
        ):
            sender.send(bad)
        sender.send(messages.encode(messages.Prefetch([3, 5])))
        until(lambda: received, "the good one arrives", 10)
    listener.close()
    assert received == [[3, 5]]
