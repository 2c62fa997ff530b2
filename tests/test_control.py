"""Leases, registry and the prefetch channel of the control plane."""

import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lora_server.control.leases import Leases
from lora_server.control.prefetch import PrefetchListener
from lora_server.control.registry import Record, Registry, check_name
from lora_server.control.shards import ShardHandle, ShardTable, wait_all
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
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import messages
from tests.serving import until


def record(name, version="v1"):
    return Record(name=name, version=version, path="/x", stamp="", lora_rank=4, nbytes=1, sites=(), warnings=())


NAMES, CLIENTS = st.sampled_from(["law", "code", "art"]), st.integers(1, 3)


class RegistryMachine(RuleBasedStateMachine):
    """Against the obvious model: a set of holds, a set of listed names, handles that exist while needed."""

    @initialize()
    def start(self):
        self.registry, self.listed, self.holds, self.alive = Registry(), {}, [], set()

    @rule(name=NAMES)
    def add(self, name):
        if name in self.listed:
            with pytest.raises(AdapterExistsError, match="remove it first"):
                self.registry.existing(name, "v2")
        else:
            handle = self.registry.add(record(name)).handle
            assert handle not in self.alive
            self.listed[name] = handle
            self.alive.add(handle)

    @rule(client=CLIENTS, names=st.lists(NAMES, max_size=3, unique=True))
    def acquire(self, client, names):
        if set(names) <= set(self.listed):
            got = [one.handle for one in self.registry.acquire(client, names)]
            assert got == [self.listed[name] for name in names]
            self.holds += [(client, handle) for handle in got]
        else:
            with pytest.raises(UnknownAdapterError):
                self.registry.acquire(client, names)

    @rule(client=CLIENTS)
    def release_one(self, client):
        own = [hold for hold in self.holds if hold[0] == client]
        if own:
            self.holds.remove(own[0])
            self.expect_freed(self.registry.release(client, [own[0][1]]))

    @rule(client=CLIENTS)
    def forget(self, client):
        self.holds = [hold for hold in self.holds if hold[0] != client]
        self.expect_freed(self.registry.forget_client(client))

    @rule(name=NAMES)
    def unlist(self, name):
        if name in self.listed:
            del self.listed[name]
            self.expect_freed(self.registry.unlist(name)[1])

    def expect_freed(self, freed):
        needed = set(self.listed.values()) | {handle for _, handle in self.holds}
        assert set(freed) == self.alive - needed
        self.alive &= needed

    @invariant()
    def what_is_needed_exists(self):
        assert {one.handle for one in self.registry.records()} == self.alive


TestRegistry = RegistryMachine.TestCase


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


def handle_of(shard, pid=1):
    return ShardHandle(pb.Registration(shard=shard, pid=pid))


def test_the_table_knows_who_is_missing():
    table = ShardTable(Layout(2, 1), "independent")
    with pytest.raises(ServerUnavailableError, match=r"\[0, 1\] of ep2-pp1 are not up"):
        table.require_up()
    first = handle_of(0)
    table.arrive(first)
    with pytest.raises(ConfigError, match="pid 1 of node 0; is a node rank used twice"):
        table.arrive(handle_of(0, pid=2))
    table.arrive(handle_of(1))
    assert sorted(table.require_up()) == [0, 1]
    pending = first.send(pb.ShardCommand(drop=1))
    assert table.depart(first)
    with pytest.raises(ShardUnavailableError, match="shard 0"):
        wait_all([pending], 1, "a drop")
    assert table.missing() == [0]


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
