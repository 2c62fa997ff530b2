"""A server with tokens and mTLS, as people start it: its own processes, engines and their steps, a revoked token."""

import os
import shutil
import signal

import pytest

from client_connector.client import Client
from client_connector.directory import Directory
from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server.access.identity import Identity, Role
from lora_server.access.store import Store, Tenant
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch
from lora_server.errors import LeaseError, ServerUnavailableError, StepError, UnauthenticatedError, UnknownAdapterError
from lora_server.registry.database import FILE, Database
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel
from tests.support.certificates import Authority
from tests.support.serving import HANG_SECONDS, flags, until
from tests.support.workload import NEW_TOKENS, workload


def test_a_server_with_tokens_and_certificates(tmp_path):
    load, authority = workload("mixtral"), Authority(tmp_path)
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
        except ServerUnavailableError:
            return False

    try:
        until(serves, "the server is ready")
        until(lambda: "serving" in server.log.read_text(), "its node sees that")
        with pytest.raises(UnauthenticatedError):
            is_ready(Credentials("", None, authority.ca, own, own_key))
        with pytest.raises(ServerUnavailableError):
            is_ready(Credentials(str(secrets[Role.ENGINE][1])))
        directory = Directory(server.address, shown(Role.PUBLISHER))
        name = directory.list()[0].name
        shutil.copytree(load.adapters / name, tmp_path / "acme" / "files")
        (tmp_path / "acme" / "own").symlink_to(tmp_path / "acme" / "files")
        assert directory.add("mine", str(tmp_path / "acme" / "own")).name == "acme/mine"
        engines = RemoteServer(server.address, "tcp", credentials=shown(Role.ENGINE))
        steps_are_encrypted(load, engines, lambda: status(shown(Role.ADMIN)).shards)
        client = Client(RemoteServer(server.address, credentials=shown(Role.ENGINE)), HANG_SECONDS)
        held = client.acquire(["mine", name])
        assert [one.name for one in held] == ["mine", name]
        with pytest.raises(UnknownAdapterError, match="known: acme/mine"):
            client.acquire(["nothing"])
        directory.close()
        operator = Identity("", Role.ADMIN)
        store.revoke_token(secrets[Role.ENGINE][0].id, operator)
        until(lambda: isinstance(client.lost(), (LeaseError, UnauthenticatedError)) or client.broken, "its lease ended")
        client.close()
        with pytest.raises(UnauthenticatedError):
            is_ready(shown(Role.ENGINE))
    finally:
        database.close()
        server.stop()


def steps_are_encrypted(load, server, shards):
    """Check that tokens are PEFT's, also after a shard, and with it its certificate, was replaced."""

    def right():
        try:
            load.check(generate(load.model, load.batch, NEW_TOKENS))
        except StepError:  # one that was under way when it died
            return False
        return lora.client.described()["transport"] == "tls"

    with attach(load.model, server, timeout_seconds=HANG_SECONDS) as lora, lora.adapters(load.names):
        assert right()
        victim = shards()[0].pid
        os.kill(victim, signal.SIGKILL)
        until(lambda: right() and shards()[0].pid != victim, "steps go on with its successor")
