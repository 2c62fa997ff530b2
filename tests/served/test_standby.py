"""A server with two controllers: one leads, the other stands by and takes over. On one host, with a real PostgreSQL."""

import contextlib
import json
import os
import signal
import threading

import psutil
import psycopg
import pytest
from sqlalchemy import text

from client_connector.serving.leases import AdapterLeases
from client_connector.serving.settings import Settings
from client_connector.transformers import attach
from lora_server import spec as specs
from lora_server.demo.launch import free_address, launch
from lora_server.errors import LoraServerError, NotLeaderError, ServerUnavailableError
from lora_server.registry.database import Database
from lora_server.registry.leadership import Leadership
from lora_server.registry.versions import Ledger
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel
from tests.support.fleet import Fleet, now
from tests.support.postgres import host_of, running_postgres
from tests.support.resizing import children_of, placed, resize
from tests.support.serving import (
    HANG_SECONDS,
    all_gone,
    ask,
    flags,
    generates,
    kill,
    listed,
    shard_processes,
    stop,
    suspended,
    until,
)

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as url:
        yield url


def server_status(address):
    """Ask one controller, or the one of several that leads."""
    with open_channel(address) as channel:
        method = rpc.ServerStub(channel).Status
        return call(method, pb.StatusRequest(), server=address, seconds=HANG_SECONDS)


def ready(address):
    try:
        return server_status(address).ready
    except LoraServerError:
        return False


class Pair:
    """A node with a controller, and a second controller. `leader` and `standby` are as they were when last asked."""

    def __init__(self, directory, load, url, *more):
        (directory / "token").write_text(TOKEN)
        self.addresses = [free_address(), free_address()]
        self.address = ",".join(self.addresses)
        shared = "--controller", self.address, "--join-token-file", str(directory / "token")
        self.flags = flags(load, "--layout", "ep2-pp1", "--adapter-root", "/", *shared, *more)
        self.url, self.directory, self.all = url, directory, {}

    def start(self, index):
        """Start the node (0), or the standby (1); does not wait."""
        own = ("--standby",) if index else ()
        self.connect(index)
        registry = self.url.replace(host_of(self.url), str(self.way(index)))
        where = "--listen", self.addresses[index], "--registry", registry
        one = launch(self.directory / f"log{index}", *self.flags, *where, *own)
        one.address = self.addresses[index]
        self.all[index] = one
        return one

    def way(self, index):
        """The way to the database that one of them has for itself."""
        return self.directory / f"way{index}"

    def connect(self, index):
        if not self.way(index).exists():
            self.way(index).symlink_to(host_of(self.url))

    def cut_off(self, *indices):
        """Take the database away from these: they have no connection, and make no new one."""
        for index in indices:
            self.way(index).unlink()
        with psycopg.connect(self.url) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def wait_settled(self):
        """Wait until one controller has a complete server and the other stands by; return both."""

        def roles():
            both = [self.all[0], self.all[1]]
            leader = next((one for one in both if one.get("/readyz")[0] == 200), None)
            other = next((one for one in both if one is not leader), None)
            return (leader, other) if leader and self.is_standby(other, leader) else None

        found = []
        until(lambda: found.append(roles()) or found[-1], "one leads and the other stands by")
        return found[-1]

    def is_standby(self, one, leader):
        return one.get("/readyz") == (503, f"this controller stands by: {leader.address} leads\n")

    def leader_dies(self):
        """Kill the controller that leads, and stop its node until the other one leads; return both as they are then."""
        leader, standby = self.wait_settled()
        with suspended(leader.process.pid):
            os.kill(server_status(leader.address).pid, signal.SIGKILL)
            until(lambda: ready(standby.address), "the standby leads")
        return standby, leader

    def changes(self, method, **fields):
        """Whether a change is made now."""
        try:
            return ask(self.address, method, **fields)
        except ServerUnavailableError:
            return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.all.values():
            assert stop(one) == 0


@pytest.fixture(scope="module")
def pair(postgres, load, tmp_path_factory):
    """Both started at once."""
    with Pair(tmp_path_factory.mktemp("pair"), load, postgres) as it:
        it.start(1)
        it.start(0)
        it.wait_settled()
        yield it


@contextlib.contextmanager
def two_nodes(directory, load, url):
    """A pair whose server has a second node; yields that, too."""
    with Pair(directory, load, url, "--nodes", "2", "--lease-seconds", str(HANG_SECONDS)) as pair:
        for index in range(2):
            pair.start(index)
        other = pair.all["other"] = launch(directory / "other", *pair.flags, "--node-rank", "1")
        pair.wait_settled()
        yield pair, other


@contextlib.contextmanager
def resizing(pair, layout):
    """Yield a list that has what came of a resize once the block has ended."""
    said = []
    asking = threading.Thread(target=lambda: said.append(resize(pair.address, layout)))
    asking.start()
    try:
        yield said
    finally:
        asking.join()


def test_a_standby_refuses_calls_and_names_the_leader(pair):
    leader, standby = pair.wait_settled()
    with pytest.raises(NotLeaderError, match=f"{standby.address}.*stands by: {leader.address} leads"):
        server_status(standby.address)
    with pytest.raises(NotLeaderError):
        ask(standby.address, "Add", name="x", uri="/x")
    assert server_status(pair.address).pid == server_status(leader.address).pid
    assert standby.get("/livez")[0] == 200
    epoch = server_status(pair.address).leader_epoch
    for one, leads in ((leader, 1), (standby, 0)):
        metrics = one.get("/metrics")[1]
        assert f"lora_server_leader {leads}.0\n" in metrics and f"lora_server_leader_epoch {float(epoch)}\n" in metrics


def test_a_killed_leader_fails_no_request(pair, load, tmp_path):
    """Its node is stopped meanwhile, so that the standby leads. Holds stay, and what is asked meanwhile is answered."""
    leader, standby = pair.wait_settled()
    ask(pair.address, "Add", name="held", uri=str(load.paths["qv"]))
    leases = AdapterLeases(Settings(pair.address, timeout_seconds=HANG_SECONDS), lambda text: ())
    with contextlib.closing(leases), Fleet(load, pair.address, tmp_path, ("auto",)) as fleet:
        leases.hold("before", "held", ())
        until(lambda: leases.is_ready("before"), "it is admitted")
        with attach(load.model, pair.address, timeout_seconds=HANG_SECONDS) as lora, lora.adapters(["held"]):
            before = server_status(pair.address)
            with suspended(leader.process.pid):
                os.kill(before.pid, signal.SIGKILL)
                leases.hold("meanwhile", "held", ())
                until(lambda: ready(standby.address), "the standby leads")
            after = server_status(standby.address)
            assert after.run == before.run and after.pid != before.pid
            assert [shard.pid for shard in after.shards] == [shard.pid for shard in before.shards]
            assert {one.client for one in after.joined} >= {one.client for one in before.joined}
            until(lambda: leases.is_ready("meanwhile"), "it is admitted")
            assert leases.is_ready("before") and not leases.state("before").failure
            until(lambda: listed(pair.address)["held"].holders == 2, "both clients said what they hold")
            assert generates(load, "qv")
            until(lambda: pair.changes("Add", name="late", uri=str(load.paths["qv"])), "changes are possible")
        fleet.check_all_right()
    assert pair.wait_settled() == (standby, leader)
    assert {"held", "late"} <= set(listed(standby.address))
    for name in ("held", "late"):
        ask(pair.address, "Remove", name=name)


def test_a_standby_leads_the_layout_that_the_server_was_resized_to(pair, load, tmp_path):
    leader, standby = pair.wait_settled()
    with Fleet(load, pair.address, tmp_path, ("auto",)) as fleet:
        done = resize(pair.address, "ep1-pp2")
        assert done.returncode == 0, done.stderr
        before = server_status(pair.address)
        assert pair.leader_dies() == (standby, leader)
        after = server_status(pair.address)
        assert (after.layout, after.generation) == ("ep1-pp2", before.generation)
        assert [shard.pid for shard in after.shards] == [shard.pid for shard in before.shards]
        fleet.all_right_again(now())
        assert pair.wait_settled() == (standby, leader)
        done = resize(pair.address, "ep2-pp1")
        assert done.returncode == 0, done.stderr
        fleet.check_all_right()


@pytest.mark.long
def test_a_leader_that_was_stopped_steps_down_and_its_late_writes_are_refused(pair, load, tmp_path):
    leader, standby = pair.wait_settled()
    stopped = psutil.Process(server_status(pair.address).pid)
    outcome = []

    def add_late():
        try:
            outcome.append(ask(leader.address, "Add", name="stale", uri=str(load.paths["qv"])))
        except LoraServerError as error:
            outcome.append(error)

    with Fleet(load, pair.address, tmp_path, ("auto",)) as fleet:
        late = threading.Thread(target=add_late)
        with suspended(stopped.pid):
            late.start()
            until(lambda: ready(standby.address), "the standby leads")
            fleet.all_right_again(now())
            until(lambda: pair.changes("Add", name="after", uri=str(load.paths["qv"])), "changes are possible")
        all_gone([stopped])
        late.join(HANG_SECONDS)
        fleet.check_all_right()
    assert isinstance(outcome[0], LoraServerError)
    assert pair.wait_settled() == (standby, leader)
    assert "after" in listed(pair.address) and "stale" not in listed(pair.address)
    ask(pair.address, "Remove", name="after")


@pytest.mark.long
def test_a_leader_that_is_cut_off_from_the_database_ends_once_the_other_leads(pair, load, tmp_path):
    leader, standby = pair.wait_settled()
    index = pair.addresses.index(leader.address)
    with Fleet(load, pair.address, tmp_path, ("auto",)) as fleet:
        before = psutil.Process(server_status(pair.address).pid)
        pair.cut_off(index)
        try:
            all_gone([before])
            until(lambda: ready(standby.address), "the standby leads")
            fleet.all_right_again(now())
            until(lambda: "cannot stand by; trying again" in leader.tail(), "its node goes on without the database")
            assert leader.process.poll() is None
        finally:
            pair.connect(index)
        assert pair.wait_settled() == (standby, leader)
        assert set(fleet.check()) == {"right"}


@pytest.mark.long
def test_a_leader_goes_on_while_the_database_is_away_for_both(pair, load, tmp_path):
    leader, _ = pair.wait_settled()
    with Fleet(load, pair.address, tmp_path, ("auto",)) as fleet:
        pid = server_status(pair.address).pid
        pair.cut_off(0, 1)
        try:
            until(lambda: "lost the session that holds the lead" in leader.log.read_text(), "it has noticed")
            fleet.all_right_again(now())
            with pytest.raises(ServerUnavailableError, match=r"--registry .* not reached within"):
                ask(pair.address, "Add", name="x", uri=str(load.paths["qv"]))
            assert server_status(pair.address).pid == pid and ready(leader.address)
        finally:
            for index in (0, 1):
                pair.connect(index)
        until(lambda: pair.changes("Add", name="x", uri=str(load.paths["qv"])), "changes are possible again")
        until(lambda: pair.changes("Remove", name="x"), "likewise")
        fleet.check_all_right()


@pytest.mark.long
def test_a_standby_that_starts_alone_leads_and_the_node_joins_it(postgres, load, tmp_path):
    with Pair(tmp_path, load, postgres) as pair:
        standby = pair.start(1)
        until(lambda: standby.get("/readyz") == (503, "shards not up: [0, 1]\n"), "it leads, without shards")
        node = pair.start(0)
        assert pair.wait_settled() == (standby, node)


@pytest.mark.long
def test_the_death_of_node_0_fails_no_request_where_there_are_a_standby_and_a_replica(postgres, load, tmp_path):
    """All processes of the host at once: the leader, and a twin of each shard."""
    more = "--nodes", "2", "--replicas", "2", "--device-pool", "64MiB", "--failover-ms", "1000"
    with Pair(tmp_path, load, postgres, *more) as pair:
        node = pair.start(0)
        node.wait_ready()
        pair.all["other"] = launch(tmp_path / "other", *pair.flags, "--node-rank", "1")
        standby = pair.start(1)
        assert pair.wait_settled() == (node, standby)
        with Fleet(load, pair.address, tmp_path, ("shm", "tcp")) as fleet:
            kill(pair.all.pop(0))
            until(lambda: ready(standby.address), "the standby leads, with one of the twins each")
            assert server_status(pair.address).degraded == "shards [0, 1] are down; their twins serve"
            until(lambda: pair.changes("Add", name="late", uri=str(load.paths["qv"])), "changes are possible")
            fleet.all_right_again(now())
            node = pair.start(0)
            until(lambda: not server_status(pair.address).degraded, "the twins are back")
            assert pair.wait_settled() == (standby, node)
            fleet.check_all_right()


@pytest.mark.long
def test_a_standby_that_leads_in_the_middle_of_a_resize_undoes_it_before_engines_move(postgres, load, tmp_path):
    """On two nodes, of which the second is late with its new shards. No request fails."""
    with two_nodes(tmp_path, load, postgres) as (pair, other):
        with Fleet(load, pair.address, tmp_path, ("shm", "tcp")) as fleet:
            serving = shard_processes(pair.address)
            with resizing(pair, "ep2-pp2") as said:
                until(lambda: set(children_of(other)) - set(serving), "a new shard of the second node")
                stopped = (set(children_of(other)) - set(serving)).pop()
                stopped.suspend()  # it never comes up
                until(lambda: server_status(pair.address).resize.done == 3, "the other new shards are up")
                pair.leader_dies()
                stopped.kill()
            assert said[0].returncode == 1, said[0].stdout
            assert "another controller has taken over, and serves on as ep2-pp1: not resized" in said[0].stderr
            assert placed(pair.address) == ("ep2-pp1", 1) and shard_processes(pair.address) == serving
            until(lambda: {*children_of(pair.all[0]), *children_of(other)} == set(serving), "the new shards ended")
            fleet.all_right_again(now())
            done = resize(pair.address, "ep2-pp2")
            assert done.returncode == 0, done.stderr
            fleet.check_all_right()


@pytest.mark.long
def test_a_standby_that_leads_while_engines_move_completes_the_resize(postgres, load, tmp_path):
    """On two nodes. An engine that was stopped meanwhile gets typed errors, and joins again; no other notices."""
    with (
        two_nodes(tmp_path, load, postgres) as (pair, _),
        Fleet(load, pair.address, tmp_path / "quick", ("shm", "tcp")) as quick,
        Fleet(load, pair.address, tmp_path / "slow", ("tcp",)) as slow,
    ):
        serving, (stopped,) = shard_processes(pair.address), slow.engines
        stopped.process.send_signal(signal.SIGSTOP)
        with resizing(pair, "ep2-pp2") as said:
            until(lambda: server_status(pair.address).resize.state == "moving", "the new shards serve")
            until(lambda: server_status(pair.address).resize.done == 2, "the others have moved")
            new = shard_processes(pair.address)
            pair.leader_dies()
        assert said[0].returncode == 0, said[0].stderr
        found = {"layout": "ep2-pp2", "generation": 2, "moved": None, "ended": None, "seconds": None}
        assert json.loads(said[0].stdout) == found
        assert placed(pair.address) == ("ep2-pp2", 2) and shard_processes(pair.address) == new
        all_gone(serving)
        stopped.process.send_signal(signal.SIGCONT)
        for fleet in (quick, slow):
            fleet.all_right_again(now())
        assert set(quick.check()) == {"right"} and slow.check()["right"]


# ---- the lock and the epoch


@pytest.fixture
def both(postgres):
    """Two that may lead one server."""
    found = [Leadership(Database(postgres), f"server of {os.getpid()}", name, seconds=3.0) for name in ("a", "b")]
    yield found
    for one in found:
        one.close()
        one.database.close()


def test_one_of_two_leads_until_its_session_ends(both):
    first, second = both
    assert first.attempt() and not second.attempt()
    assert second.leader == (first.epoch, "a")
    first.close()
    until(second.attempt, "the lock is free")
    assert second.epoch == first.epoch + 1


def test_a_write_of_an_earlier_epoch_changes_nothing(both, load):
    first, second = both
    assert first.attempt()
    model = specs.load(str(load.base)).to_json()
    ledger = Ledger(first.database, model)
    end = text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE objid::bigint = :low AND locktype = 'advisory'")
    second.database.read(lambda connection: connection.execute(end, {"low": first.key & 0xFFFFFFFF}))
    until(second.attempt, "its session has ended, and it does not know")
    with pytest.raises(NotLeaderError, match=r"controller a leads no longer: b does since epoch .*nothing was changed"):
        ledger.take_handles()
    assert Ledger(second.database, model).take_handles()
    assert first.keep(threading.Event(), str) == "b", "it learns that it does not lead"


def test_a_leader_takes_its_lock_again_when_the_database_ended_its_session(both):
    first, second = both
    assert first.attempt()
    first.close()
    stopping = threading.Event()
    keeping = threading.Thread(target=first.keep, args=(stopping, str))
    keeping.start()
    try:
        until(lambda: first.has_lock, "it has the lock again")
        # on a busy machine a session may end again before the other one looks
        until(lambda: not second.attempt() and second.leader == (first.epoch, "a"), "the other sees that it leads")
    finally:
        stopping.set()
        keeping.join(HANG_SECONDS)
