"""A server with tokens and mTLS, as people start it; and what a tenant may have at most."""

import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_connector.client import Client
from client_connector.directory import AdapterDirectory
from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server import errors
from lora_server.access.gate import Gate
from lora_server.access.identity import Identity, Role
from lora_server.access.store import Store, Tenant
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.members.leases import EngineTraits
from lora_server.control.rpc.calls import Refusals
from lora_server.control.rpc.scope import Scopes
from lora_server.control.rpc.service import AdaptersService, ClientsService
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch
from lora_server.registry.database import FILE, Database
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel
from tests.support.certificates import Authority
from tests.support.restarts import SECONDS, Server
from tests.support.serving import HANG_SECONDS, flags, until
from tests.support.signed import signed
from tests.support.workload import NEW_TOKENS


def test_a_server_with_tokens_and_certificates(load, tmp_path):
    authority = Authority(tmp_path)
    (cert, key), (own, own_key) = authority.issue("server"), authority.issue("engine")
    data = tmp_path / "data"
    data.mkdir()
    database = Database(f"sqlite:///{data / FILE}")
    store = Store(database)
    store.set_tenant(Tenant("acme"))
    secrets = {role: store.create_token("acme", role) for role in (Role.ENGINE, Role.PUBLISHER)}
    secrets[Role.ADMIN] = store.create_token("", Role.ADMIN)
    more = ("--adapter-root", str(tmp_path), "--layout", "ep2-pp1", "--coordination", "leader", "--data-dir", str(data))
    tls = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", authority.ca, "--tls-client-ca", authority.ca)
    server = launch(tmp_path / "log", *flags(load, *more, *map(str, tls)))

    def shown(role):
        return Credentials(str(secrets[role][1]), None, authority.ca, own, own_key)

    def status(credentials):
        with open_channel(server.address, credentials) as channel:
            asked = rpc.ServerStub(channel).Status
            return call(asked, pb.StatusRequest(), server=server.address, seconds=HANG_SECONDS)

    def is_ready(credentials):
        return status(credentials).ready

    def serves():
        assert server.process.poll() is None, server.tail()
        try:
            return is_ready(shown(Role.ENGINE))
        except errors.ServerUnavailableError:
            return False

    try:
        until(serves, "the server is ready")
        until(lambda: "serving" in server.log.read_text(), "its node sees that")
        with pytest.raises(errors.UnauthenticatedError):
            is_ready(Credentials("", None, authority.ca, own, own_key))
        with pytest.raises(errors.ServerUnavailableError):
            is_ready(Credentials(str(secrets[Role.ENGINE][1])))
        directory = AdapterDirectory(server.address, shown(Role.PUBLISHER))
        name = directory.list()[0].name
        shutil.copytree(load.adapters / name, tmp_path / "acme" / "files")
        (tmp_path / "acme" / "own").symlink_to(tmp_path / "acme" / "files")
        assert directory.add("mine", str(tmp_path / "acme" / "own")).name == "acme/mine"
        engines = RemoteServer(server.address, "tcp", credentials=shown(Role.ENGINE))
        steps_are_encrypted(load, engines, lambda: status(shown(Role.ADMIN)).shards)
        client = Client(RemoteServer(server.address, credentials=shown(Role.ENGINE)), HANG_SECONDS)
        held = client.acquire(["mine", name])
        assert [one.name for one in held] == ["mine", name]
        with pytest.raises(errors.UnknownAdapterError, match="known: acme/mine"):
            client.acquire(["nothing"])
        directory.close()
        operator = Identity("", Role.ADMIN)
        store.revoke_token(secrets[Role.ENGINE][0].id, operator)
        ended = (errors.LeaseError, errors.UnauthenticatedError)
        until(lambda: isinstance(client.lost(), ended) or client.broken, "its lease ended")
        client.close()
        with pytest.raises(errors.UnauthenticatedError):
            is_ready(shown(Role.ENGINE))
    finally:
        database.close()
        server.stop()


def steps_are_encrypted(load, server, shards):
    """Check that tokens are PEFT's, also after a shard, and with it its certificate, was replaced."""

    def right():
        try:
            load.check(generate(load.model, load.batch, NEW_TOKENS))
        except errors.StepError:  # one that was under way when it died
            return False
        return lora.client.described()["transport"] == "tls"

    with attach(load.model, server, timeout_seconds=HANG_SECONDS) as lora, lora.adapters(load.names):
        assert right()
        victim = shards()[0].pid
        os.kill(victim, signal.SIGKILL)
        until(lambda: right() and shards()[0].pid != victim, "steps go on with its successor")


PUBLISHER, ENGINE = Identity("acme", Role.PUBLISHER), Identity("acme", Role.ENGINE)


class Tenants(Server):
    """Its services, as tenant acme calls them."""

    def __init__(self, directory):
        super().__init__(directory)
        self.gate = Gate(self.database)
        self.controller.adapters.rollout.allowed = Allowed((str(directory),))
        scopes = Scopes(self.controller, self.gate)
        self.catalogue = AdaptersService(self.controller, scopes)
        self.clients = ClientsService(self.controller, scopes, Refusals())
        self.limit()
        for name, path in self.paths.items():
            shutil.copytree(path, directory / "acme" / name)

    def limit(self, **limits):
        self.gate.store.set_tenant(Tenant("acme", **limits))
        self.gate.cache.refresh()

    def add(self, name, kind):
        request = pb.AddAdapterRequest(name=name, uri=str(self.directory / "acme" / kind), wait_seconds=SECONDS)
        return self.catalogue.Add(request, PUBLISHER)

    def update(self, name, kind):
        request = pb.UpdateAdapterRequest(name=name, uri=str(self.directory / "acme" / kind), wait_seconds=SECONDS)
        return self.catalogue.Update(request, PUBLISHER)

    def rollback(self, name):
        return self.catalogue.Rollback(pb.RollbackAdapterRequest(name=name, wait_seconds=SECONDS), PUBLISHER)

    def join(self):
        lease, _ = self.controller.clients.join("engine", EngineTraits(tenant="acme"))
        return lease.proof

    def acquire(self, proof, *names, ticket=0):
        return self.clients.Acquire(signed(pb.AcquireRequest(names=names, ticket=ticket), proof), ENGINE)

    def close(self):
        self.gate.close()
        super().close()


@pytest.fixture
def server(tmp_path):
    one = Tenants(tmp_path)
    yield one
    one.close()


def test_what_waits_for_a_place_counts_as_in_use(server):
    for kind in ("qv", "attention", "experts"):
        server.add(kind, kind)
    server.limit(max_active=2)
    one, other = server.join(), server.join()
    server.adapters.admission.pause("a test", 0)  # nobody gets a place
    assert server.acquire(one, "qv", ticket=1).position == 1
    assert server.acquire(other, "qv", "attention", ticket=1).position == 2
    with pytest.raises(errors.LimitError, match="tenant acme: got 3 adapters in use, 2 may be"):
        server.acquire(other, "experts", ticket=2)
    assert server.acquire(one, "qv", ticket=1).position == 1, "asked again it is no second one"
    server.adapters.admission.pause("", 0)
    held = server.acquire(other, "qv", "attention", ticket=1).adapters
    assert [adapter.name for adapter in held] == ["qv", "attention"]
    server.clients.Release(signed(pb.ReleaseRequest(handles=[adapter.handle for adapter in held]), other), ENGINE)
    assert len(server.acquire(other, "experts").adapters) == 1, "what was let go does not count"


def test_of_many_that_ask_at_once_no_more_are_let_in_than_may_be(server):
    kinds = sorted(server.paths)[:4]
    for kind in kinds:
        server.add(kind, kind)
    server.limit(max_active=1)
    server.adapters.admission.pause("a test", 0)
    together, refused = threading.Barrier(len(kinds)), []

    def ask(kind):
        proof = server.join()
        together.wait(SECONDS)
        try:
            server.acquire(proof, kind, ticket=1)
        except errors.LimitError:
            refused.append(kind)

    with ThreadPoolExecutor(len(kinds)) as threads:
        list(threads.map(ask, kinds))
    assert len(refused) == len(kinds) - 1
    server.adapters.admission.pause("", 0)


def test_an_update_and_a_rollback_stay_within_a_tenants_bytes(server):
    small, large = server.add("law", "qv"), server.add("code", "fused")
    assert small.bytes < large.bytes
    server.limit(max_bytes=small.bytes + large.bytes)
    told = set(server.shard.memory.loads)
    with pytest.raises(errors.LimitError, match="tenant acme: got adapters of"):
        server.update("law", "experts")
    served = {"acme/law": small.version, "acme/code": large.version}
    assert server.served() == served and set(server.shard.memory.loads) == told, "nothing was loaded for it"
    shrunk = server.update("code", "attention")
    assert shrunk.bytes < large.bytes, "there is room for it though both versions are there for a while"
    server.limit(max_bytes=small.bytes + shrunk.bytes)
    with pytest.raises(errors.LimitError):
        server.rollback("code")
    assert server.served() == served | {"acme/code": shrunk.version}


def test_a_version_that_is_still_held_counts(server):
    bytes_of = {kind: server.add(kind, kind).bytes for kind in ("qv", "experts", "fused")}
    server.catalogue.Remove(pb.RemoveAdapterRequest(name="fused"), PUBLISHER)
    server.limit(max_bytes=bytes_of["experts"] + bytes_of["fused"])
    proof = server.join()
    (held,) = server.acquire(proof, "qv").adapters
    server.update("qv", "attention")  # the old one drains
    with pytest.raises(errors.LimitError):
        server.update("qv", "fused")
    server.clients.Release(signed(pb.ReleaseRequest(handles=[held.handle]), proof), ENGINE)
    assert server.update("qv", "fused").bytes == bytes_of["fused"]
