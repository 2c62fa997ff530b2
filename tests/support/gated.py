"""A controller with tokens: its gRPC and HTTP servers, a shard that answers, and tokens of every role."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from typer.testing import CliRunner

from lora_server.access.gate import Gate
from lora_server.access.identity import Role
from lora_server.access.store import Tenant
from lora_server.cli import app
from lora_server.control.adapters.records import Record
from lora_server.control.events.log import EventLog
from lora_server.control.http import page
from lora_server.control.http.server import HttpServer
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.registry.database import FILE, Database
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel
from tests.support.controllers import ToldShard, kept, make_controller
from tests.support.serving import HANG_SECONDS, heard
from tests.support.signed import proof_of

SECRET = "of this run's nodes"
ADAPTERS = ("law", "org/art", "acme/bot", "acme/taxes", "rival/bot", "rival/secret")
TENANTS = ("", "acme", "rival")


class Gated:
    """`tokens` by (tenant, role); the operator is ''."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, url: str = "", controller=None, **tls) -> None:
        self.url = url or f"sqlite:///{directory / FILE}"
        self.database = Database(self.url)
        stack.callback(self.database.close)
        self.gate = gate = Gate(self.database, node_secret=SECRET)
        stack.callback(gate.close)
        self.controller = controller = controller or make_controller(settled=False)
        stack.callback(controller.shards.close)
        memory = [(name, 65_600 + number) for number, name in enumerate(ADAPTERS)]
        self.handles = dict(memory)
        self.shard = ToldShard(controller)
        stack.callback(self.shard.close)
        controller.adapters.sync.spread.add(self.handles.values())
        for name, handle in memory:
            load = kept(name, handle)
            controller.adapters.catalog.publish(Record.decode(load.record))
            self.shard.handle.commands.send(pb.ShardCommand(load=load))
        for tenant in TENANTS[1:]:
            gate.store.set_tenant(Tenant(tenant))
        self.tokens = {
            (tenant, role): str(gate.store.create_token(tenant, role)[1]) for tenant in TENANTS for role in Role
        }
        gate.cache.refresh()
        gate.cache.on_change = lambda: controller.clients.end_where(
            lambda lease: not gate.is_good(*lease.engine.credentials), "its token was revoked"
        )
        self.control = ControlServer(controller, "127.0.0.1:0", Doorkeeper(SECRET), gate=gate, **tls)
        stack.callback(lambda: self.control.close(0.2))
        self.http = HttpServer(
            "127.0.0.1", 0, controller.not_ready, None, page.answers(controller, gate.names.owner, EventLog()), gate
        )
        stack.callback(self.http.close)
        self.address = f"127.0.0.1:{self.control.port}"

    def ask(self, token, service, method, request):
        """Make one call with the token; raises the server's error."""
        with open_channel(self.address, Credentials(token=token)) as channel:
            stub = getattr(getattr(rpc, f"{service}Stub")(channel), method)
            return call(stub, request, server=self.address, seconds=HANG_SECONDS)

    def join(self, tenant, role=Role.ENGINE):
        """The proof of a new lease."""
        lease = self.ask(self.tokens[tenant, role], "Clients", "Join", pb.JoinRequest(instance=f"engine of {tenant}"))
        return proof_of(lease)

    def get(self, path, header="", port=0):
        """Status, body and head of an HTTP GET; of a stream up to its first event."""
        with socket.create_connection(("127.0.0.1", port or self.http.port), HANG_SECONDS) as connection:
            shown = f"Authorization: {header}\r\n" if header else ""
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{shown}\r\n"
            connection.sendall(head.encode("latin-1"))
            answer = heard(connection, b"\n\n\r\n" if path == "/status.events" else b"")
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode(errors="replace"), head.decode()


def cli(*arguments):
    """Run the command in this process."""
    return CliRunner().invoke(app, arguments)


def as_(gated, tenant, role, service, method, request):
    """One call of a tenant's role."""
    return gated.ask(gated.tokens[tenant, role], service, method, request)
