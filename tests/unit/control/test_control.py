"""Leases, registry, its database, shards of the control plane, and how often each adapter was held."""

import random
import sqlite3
import stat
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lora_server import errors
from lora_server.control.adapters.records import FIRST_HANDLE, Record
from lora_server.control.admission.holds import ClientHolds
from lora_server.control.admission.tally import Sum, Tally
from lora_server.control.members.leases import HEARTBEATS, Leases, heartbeat_pause
from lora_server.control.members.shards import ShardHandle, ShardTable, wait_all
from lora_server.per_tenant import PerTenant
from lora_server.placement import Layout
from lora_server.registry.database import FILE, Database, count, counted
from lora_server.spec import Invocation, Site
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import kept, make_controller


def test_a_name_that_is_taken_by_another_version_is_refused():
    adapters, record = make_controller().adapters, Record.decode(kept("law", 1).record)
    assert (record.sites, record.invocation, record.warnings) == ((Site(0, "qkv"),), Invocation((1, 2)), ("careful",))
    assert Record.decode(record.encode()) == record
    adapters.catalog.publish(record)
    existing = adapters.changes.existing
    assert existing("law", "v1").handle == 1 and existing("code", "v1") is None
    with pytest.raises(errors.AdapterExistsError, match="adapters update law SOURCE"):
        existing("law", "v2")
    assert adapters.catalog.ledger.next_handle() == FIRST_HANDLE, "none is used twice, and all fit a shard's kernel"


NAMES, CLIENTS = st.sampled_from(["law", "acme/law", "acme/code", "rival/law"]), st.integers(1, 3)


class AdaptersMachine(RuleBasedStateMachine):
    """Against the obvious model: holds, listed names, handles that exist while needed, clients yet to speak."""

    @initialize()
    def start(self):
        self.adapters = make_controller().adapters
        self.listed, self.holds, self.alive, self.silent, self.next = {}, [], set(), {}, 1
        self.name_of = {}  # a name has several handles, while its earlier versions drain

    @rule(name=NAMES)
    def add(self, name):
        if name not in self.listed:
            self.adapters.recovery.adopt([kept(name, self.next)], (), 0)
            self.listed[name], self.name_of[self.next] = self.next, name
            self.alive.add(self.next)
            self.next += 1

    @rule(client=CLIENTS, names=st.lists(NAMES, max_size=3, unique=True))
    def acquire(self, client, names):
        if set(names) <= set(self.listed):
            got = [one.handle for one in self.adapters.admission.acquire(client, names)[0]]
            assert got == [self.listed[name] for name in names]
            self.holds += [(client, handle) for handle in got]
        else:
            with pytest.raises(errors.UnknownAdapterError):
                self.adapters.admission.acquire(client, names)

    @rule(client=CLIENTS)
    def release_one(self, client):
        own = [hold for hold in self.holds if hold[0] == client]
        if own:
            self.holds.remove(own[0])
            self.adapters.admission.release(client, [own[0][1]])

    @rule(client=CLIENTS)
    def forget(self, client):
        self.holds = [hold for hold in self.holds if hold[0] != client]
        self.silent.pop(client, None)
        self.adapters.admission.forget_client(client)

    @rule(name=NAMES)
    def remove(self, name):
        if name in self.listed:
            holders = {client for client, handle in self.holds if handle == self.listed[name]}
            del self.listed[name]
            assert self.adapters.rollout.remove(name) == len(holders)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name, pinned):
        if name in self.listed:
            self.adapters.changes.amend(self.adapters.listings.get(name).record, pinned=pinned)

    @rule(client=st.integers(4, 5), name=NAMES, times=st.integers(1, 2))
    def a_client_of_an_earlier_controller(self, client, name, times):
        if name in self.listed and client not in self.silent:
            self.adapters.admission.holds.expect(client)
            self.silent[client] = [self.listed[name]] * times

    @rule(client=st.integers(4, 5))
    def speaks(self, client):
        if client in self.silent:
            assert self.adapters.admission.holds.is_unknown(client)
            handles = self.silent.pop(client)
            self.adapters.admission.restore(client, handles)
            own = [hold for hold in self.holds if hold[0] == client and hold[1] == handles[0]]
            self.holds += [(client, handles[0])] * max(0, len(handles) - len(own))

    @invariant()
    def sets_equal_a_full_scan(self):
        catalog = self.adapters.catalog
        pinned, draining = catalog.marks.pinned_and_draining()
        assert draining == sorted(one.handle for one in catalog.records() if not catalog.is_listed(one))
        assert pinned == {one.handle for one in catalog.records(listed=True) if one.pinned}

    @invariant()
    def what_is_needed_exists_and_nothing_else(self):
        needed = set(self.listed.values()) | {handle for _, handle in self.holds}
        self.alive = self.alive if self.silent else self.alive & needed
        assert {one.record.handle for one in self.adapters.listings.all()} == self.alive
        for one in self.adapters.listings.all():
            assert one.holders == len({client for client, handle in self.holds if handle == one.record.handle})
            assert (one.state == "draining") == (one.record.handle not in self.listed.values())

    @invariant()
    def a_tenants_names_in_use_are_those_of_versions_that_are_held(self):
        held = {self.name_of[handle] for _, handle in self.holds}
        for tenant in ("acme", "rival", "nobody"):
            assert self.adapters.admission._names.of(tenant) == {name for name in held if name.startswith(f"{tenant}/")}


TestAdapters = AdaptersMachine.TestCase
TestAdapters.settings = settings(max_examples=50, deadline=None)


@given(st.integers(1, 20))
def test_leases_are_unique_and_end_once(count):
    leases = Leases(seconds=60)
    granted = [leases.grant("test") for _ in range(count)]
    assert len({lease.client for lease in granted}) == len({lease.proof.key for lease in granted}) == count
    for lease in granted:
        assert leases.renew(lease.proof) == lease.client
        with pytest.raises(errors.LeaseError, match="join again"):
            leases.renew(lease.proof._replace(epoch=lease.epoch + 1))
        with pytest.raises(errors.LeaseError, match="join again"):
            leases.renew(lease.proof._replace(key=bytes(32)))
        assert not leases.end(lease.client, lease.epoch + 1)
        assert leases.end(lease.client, lease.epoch)
        assert not leases.end(lease.client, lease.epoch)
    assert len(leases) == 0


def test_silent_leases_expire_but_not_by_a_stall_of_the_controllers_own(clock):
    leases = Leases(seconds=10.0, clock=clock)
    silent, lively = leases.grant("silent"), leases.grant("lively")
    for _ in range(2):
        clock.advance(5.0)
        leases.renew(lively.proof)
        assert leases.take_expired() == [], "not yet"
    clock.advance(0.1)
    assert leases.take_expired() == [silent]
    clock.advance(11.0)  # it stalls for longer than a lease lasts
    leases.excuse(11.0)
    assert leases.take_expired() == [] and leases.renew(lively.proof)


def test_the_more_clients_the_longer_between_their_heartbeats():
    for clients, pause in ((0, 0.0), (HEARTBEATS, 1.0), (HEARTBEATS * 3 // 2, 1.5), (5 * HEARTBEATS, 2.0)):
        assert heartbeat_pause(clients, 10.0) == pause, "2 s at most: a lease needs several"


def handle_of(shard, pid=1, epoch=0):
    return ShardHandle(pb.Registration(shard=shard, pid=pid, instance=str(pid), epoch=epoch))


def test_the_table_knows_who_is_missing():
    table = ShardTable(Layout(2, 1), "independent")
    with pytest.raises(errors.ServerUnavailableError, match=r"\[0, 1\] of ep2-pp1 are not up"):
        table.require_up()
    first = handle_of(0)
    table.arrive(first)
    with pytest.raises(errors.ServerUnavailableError, match="pid 1 of node 0; is a node rank used twice"):
        table.arrive(handle_of(0, pid=2))
    table.arrive(handle_of(1))
    assert sorted(table.require_up()) == [0, 1]
    pending = first.commands.send(pb.ShardCommand(drop=1))
    assert table.depart(first)
    with pytest.raises(errors.ShardUnavailableError, match="shard 0"):
        wait_all([pending], 1, "a drop")
    assert table.missing() == [0]


def test_a_shard_that_does_not_report_is_missing_until_it_does(clock):
    table = ShardTable(Layout(1, 1), "independent", clock=clock)
    handle = arrived(table, handle_of(0))
    clock.advance(Timings.shard_silence)
    assert table.missing() == []
    clock.advance(0.1)
    assert table.missing() == [0]
    table.update(handle, pb.ShardStats())
    assert table.missing() == []
    clock.advance(Timings.shard_silence + 0.1)
    assert arrived(table, handle_of(0, pid=2)).epoch > handle.epoch, "another may have its rank"


def test_a_shard_that_ended_without_notice_is_lost_until_another_comes(clock):
    table = ShardTable(Layout(2, 1), "independent", clock=clock)
    of_node1 = ShardHandle(pb.Registration(shard=1, node=1, pid=1, instance="1"))
    first, second = arrived(table, handle_of(0)), arrived(table, of_node1)
    heard = clock.time()
    clock.advance(1.0)
    table.update(first, pb.ShardStats())
    first.leaving = True
    assert table.depart(first) and table.depart(second)
    assert table.lost() == {1: (second, pytest.approx(heard))}, "the first said that it leaves"
    third = arrived(table, handle_of(1, pid=2))
    assert table.lost() == {}
    clock.advance(Timings.shard_silence + 0.1)
    assert table.lost() == {1: (third, pytest.approx(heard + 1.0))}, "its host is gone, and its stream is there still"


def arrived(table, handle, settled=True):
    table.arrive(handle, settled)
    return handle


def test_a_rank_has_one_claimant():
    """A process that was replaced while it was away is refused; one that comes back itself is accepted."""
    table = ShardTable(Layout(1, 1), "independent")
    first = arrived(table, handle_of(0, pid=1))
    again = arrived(table, handle_of(0, pid=1, epoch=first.epoch))
    assert again.epoch == first.epoch, "its old stream is still there"
    assert arrived(table, handle_of(0, pid=1)).epoch == first.epoch, "it was never told its claim"
    again = arrived(table, handle_of(0, pid=1, epoch=first.epoch))
    assert not table.depart(first) and table.live() == {0: again}
    assert table.depart(again)
    second = arrived(table, handle_of(0, pid=2))
    assert second.epoch > first.epoch and table.ranks[0].restarts == 1
    with pytest.raises(errors.LeaseError, match="pid 1 of node 0 was replaced"):
        table.arrive(handle_of(0, pid=1, epoch=first.epoch))


def test_a_restarted_controller_believes_the_newest_claimant():
    old, new = 7, 8
    table = ShardTable(Layout(1, 1), "independent")
    orphan = arrived(table, handle_of(0, pid=1, epoch=old), settled=False)
    assert orphan.epoch == old, "a controller that knows nothing believes the first"
    pending = orphan.commands.send(pb.ShardCommand(drop=1))
    assert arrived(table, handle_of(0, pid=2, epoch=new), settled=False).epoch == new, "until a newer one comes"
    assert isinstance(pending.error, errors.ShardUnavailableError)
    table = ShardTable(Layout(1, 1), "independent")
    usurper = arrived(table, handle_of(0, pid=3), settled=False)
    holder = arrived(table, handle_of(0, pid=1, epoch=old), settled=False)
    assert holder.epoch > usurper.epoch, "one that had the rank goes before one that waited for it"
    with pytest.raises(errors.LeaseError, match="pid 3"):
        table.arrive(handle_of(0, pid=3, epoch=usurper.epoch), settled=False)
    with pytest.raises(errors.ServerUnavailableError, match="served by pid 1"):
        table.arrive(handle_of(0, pid=4), settled=True)


def test_a_leader_without_its_followers_is_missing():
    table = ShardTable(Layout(2, 1), "leader")
    leader = handle_of(0)
    table.arrive(leader)
    table.arrive(handle_of(1))
    assert table.missing() == [0]
    table.update(leader, pb.ShardStats(followers=1))
    assert table.missing() == []


def test_a_command_that_is_never_answered_has_a_deadline():
    with pytest.raises(errors.ServerUnavailableError, match=r"shard 0: loading did not finish within 0\.1 s"):
        wait_all([handle_of(0).commands.send(pb.ShardCommand(drop=1))], 0.1, "loading")


def url(directory):
    return f"sqlite:///{directory / FILE}"


def test_the_file_is_private_and_crash_safe(database, tmp_path):
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    ask = ("journal_mode", "synchronous", "foreign_keys")
    told = database.read(lambda connection: [connection.exec_driver_sql(f"PRAGMA {one}").scalar() for one in ask])
    assert told == ["wal", 2, 1]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_transaction_that_fails_leaves_nothing(database):
    def fail(connection):
        count(connection, "handles")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        database.write(fail)
    assert database.read(lambda connection: counted(connection, "handles")) == 0


def test_a_writer_waits_for_the_lock_until_its_deadline(database, tmp_path):
    holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(errors.ServerUnavailableError, match=r"not reached within 0.1 s: database is locked"):
        database.write(lambda connection: count(connection, "handles"), 0.1)
    assert database.read(lambda connection: counted(connection, "schema")) == 1, "who reads does not wait"
    holder.execute("ROLLBACK")
    assert database.write(lambda connection: count(connection, "handles")) == 1
    holder.close()


@pytest.mark.parametrize(("given", "said"), [
    ("mysql://host/x", r"--registry: got mysql://\.\.\., expected postgresql://USER@HOST/DATABASE"),
    ("nothing", "--registry: got no URL"),
    ("sqlite:////proc/none/registry.sqlite", "cannot be made or written to"),
])  # fmt: skip
def test_a_bad_url_is_refused(given, said):
    with pytest.raises(errors.ConfigError, match=said):
        Database(given)


def test_other_files_and_newer_schemas_are_left_alone_and_nothing_stays_open(tmp_path):
    before = set(Path("/proc/self/fd").iterdir())
    first = Database(url(tmp_path))
    first.write(lambda connection: count(connection, "schema"))
    first.close()
    with pytest.raises(errors.ConfigError, match="written by a newer server: got schema 2, expected 1 at most"):
        Database(url(tmp_path))
    assert set(Path("/proc/self/fd").iterdir()) == before
    (tmp_path / FILE).write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(errors.ConfigError, match="cannot be opened: file is not a database; expected a file of SQLite"):
        Database(url(tmp_path))


TENANTS = {handle: f"tenant-{handle}" for handle in range(1, 40)}


def test_tenants_beyond_the_first_hundred_share_a_counter():
    counters = PerTenant(Counter, most=2)
    for tenant in ("", "acme", "rival", "acme", "other"):
        counters.of(tenant)["steps"] += 1
    assert counters.all() == {"(operator)": {"steps": 1}, "acme": {"steps": 2}, "(other)": {"steps": 2}}


def test_every_end_of_a_hold_counts_once(clock):
    tally = Tally(TENANTS.get, clock.now)
    holds = ClientHolds(tally.changed)
    holds.acquire(1, [1, 1, 2])
    clock.advance(2)
    holds.release(1, [1, 3])  # what is not held is ignored
    holds.restore(2, [2, 2])
    clock.advance(3)
    holds.forget_client(1)
    holds.acquire(2, [99])  # an adapter that is gone when its holds end
    clock.advance(1)
    holds.forget_client(2)
    assert tally.sums() == ({"tenant-1": Sum(2, 7.0), "tenant-2": Sum(3, 5.0 + 4.0 + 4.0)}, Sum(1, 1.0))


def test_the_hot_ones_get_names_and_every_hold_adds_to_one_sum(clock):
    """First the tail is called, then a few hot ones: they take the places, and a difference is what ended between."""
    rng = random.Random(3)
    tally = Tally(TENANTS.get, clock.now, most=4, review=50)
    seen = {"(other)": Sum()}
    for turn in range(600):
        handle = rng.randrange(10, 40) if turn < 200 or turn % 3 == 0 else rng.choice([1, 2])
        tally.changed(handle, 1)
        clock.advance(1)
        tally.changed(handle, -1)
        own, others = tally.sums()
        now = {**own, "(other)": others}
        looked = seen.keys() - now.keys() or (turn + 1) % 50 == 0
        more = sum(one.holds - seen.get(name, Sum()).holds for name, one in now.items())
        assert len(own) <= 4 and (more == 1 or (looked and more == 0)), (turn, more)
        seen = now
    assert {"tenant-1", "tenant-2"} <= own.keys()
