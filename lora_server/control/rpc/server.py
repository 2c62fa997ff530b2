"""The controller's gRPC server: all services at one address, with separate threads for calls that must not wait for
each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from lora_server.access.gate import Gate
from lora_server.access.identity import Identity
from lora_server.access.rights import CHANGES
from lora_server.access.service import AccessService
from lora_server.control.adapters.resolver import Resolver
from lora_server.control.clients import MAX_WAITERS
from lora_server.control.connections import MAX_OF_A_HOST
from lora_server.control.controller import Controller
from lora_server.control.events.log import EventLog
from lora_server.control.members.ranks import RankLeases
from lora_server.control.rpc.calls import Refusals
from lora_server.control.rpc.events import EventsService
from lora_server.control.rpc.files import FilesService
from lora_server.control.rpc.listener import (
    MAX_SILENT_CALLS,
    Listener,
    Service,
    StreamMethod,
    ThreadGroups,
    Threads,
    UnaryMethod,
)
from lora_server.control.rpc.nodes import NodesService
from lora_server.control.rpc.registration import Doorkeeper, ShardsService
from lora_server.control.rpc.scope import Scopes
from lora_server.control.rpc.service import AdaptersService, ClientsService, HealthService, ServerService
from lora_server.errors import LoraServerError, PermissionDeniedError, ServerUnavailableError
from lora_server.sources.urls import is_remote
from lora_server.wire import lora_server_pb2 as pb

_SHARDS = pb.DESCRIPTOR.services_by_name["Shards"].full_name
_SUBJECTS = ("name", "id", "tenant", "role", "on_behalf_of", "stop")
Runs: TypeAlias = Threads | ThreadGroups
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def _tenant(_: Message, who: Identity) -> str:
    """Group calls by tenant, so that a tenant's calls wait only for each other."""
    return who.tenant


def _slow_group(request: Message, who: Identity) -> tuple[str, bool]:
    """Group calls by tenant and by remote or local source, so that local adds do not wait for fetches."""
    return who.tenant, is_remote(getattr(request, "uri", ""))


def _nothing() -> None:
    """Do nothing. Runs on the threads of heartbeats, to measure how long they wait."""


def _kept(call: str, answer: Callable[[Message, Identity], Message], gate: Gate) -> Callable[..., Message]:
    """Wrap a call so that its outcome goes to the audit log: always if the call changes something, otherwise only if
    permission was denied."""

    def kept(request: Message, who: Identity) -> Message:
        try:
            reply = answer(request, who)
        except LoraServerError as error:
            if call in CHANGES:
                gate.changed(who, call, _subject(request), error)
            elif isinstance(error, PermissionDeniedError):
                gate.audit.note(who, call, _subject(request), error)
            raise
        if call in CHANGES:
            gate.changed(who, call, _subject(request), None)
        return reply

    return kept


def _subject(request: Message) -> str:
    """Return a request's subject for the audit log; never a URL, which may contain a password."""
    told = (f"{name}={value}" for name in _SUBJECTS if (value := getattr(request, name, "")))
    return " ".join(told)


def _methods(service: str, servicer: object, gate: Gate, threads: Runs, **apart: Runs) -> tuple[str, Service]:
    """Return a service's full name and methods, each answered by the servicer's method of the same name.

    A method runs on the threads that `apart` gives for it, otherwise on `threads`.
    """
    described = pb.DESCRIPTOR.services_by_name[service]
    return described.full_name, {
        method.name: UnaryMethod(
            message_factory.GetMessageClass(method.input_type),
            _kept(f"{service}/{method.name}", getattr(servicer, method.name), gate),
            apart.get(method.name, threads),
            method.name == "Join"
            or ("proof" in method.input_type.fields_by_name and method.name != "Leave"),  # Leave needs no valid lease
        )
        for method in described.methods
    }


class ControlServer:
    """The controller's gRPC services; it serves from its constructor on. Leases are renewed on threads that run no slow
    call."""

    def __init__(
        self,
        controller: Controller,
        address: str,
        door: Doorkeeper,
        reflection: bool = False,
        gate: Gate | None = None,
        tls: grpc.ServerCredentials | None = None,
        max_silent_calls: int = MAX_SILENT_CALLS,
        max_strangers: int = MAX_OF_A_HOST,
        files: Callable[[Controller, Threads], FilesService] = FilesService,
        held: bool = False,
        resolver: Resolver | None = None,
        events: EventsService | None = None,
    ) -> None:
        """Start serving; raises RuntimeError if it cannot listen at `address`."""
        leases, joins = Threads("leases", 8, 4096), Threads("joins", 8, 1024)  # a join waits for every shard
        waits = Threads("waits", MAX_WAITERS + 8, 4096)
        access = Threads("access", 4, 1024)
        adds = ThreadGroups("adds", 16, 4096, _slow_group)  # files are read and fetched, loads are waited for
        changes = ThreadGroups("changes", 4, 1024, _tenant)  # shards are waited for, a few seconds
        reads, shards = Threads("reads", 4, 1024), Threads("shards", 4, controller.agreement.layout.num_shards)
        reading = Threads("files", 4, 4096)
        self._leases, self._asked = leases, 0.0
        self._heard: Future[None] | None = None
        self._threads = leases, joins, waits, access, adds, changes, reads, shards, reading
        self._health = HealthService()
        gate = gate or Gate()
        scopes = Scopes(controller, gate, resolver)
        refusals = Refusals()
        adapters, clients = AdaptersService(controller, scopes), ClientsService(controller, scopes, refusals)
        check_class = controller.adapters.admission.classes.known.check
        access_service = AccessService(gate, scopes.find, scopes.begin_with, check_class)
        own = dict(
            [
                _methods("Adapters", adapters, gate, adds, List=reads, Get=reads, Remove=changes, Unpin=changes),
                _methods("Clients", clients, gate, leases, Join=joins, Borrow=joins, Await=waits),
                _methods("Server", ServerService(controller, scopes), gate, reads, Drain=access, Resize=access),
                _methods("Events", events or EventsService(EventLog(), ""), gate, reads),
                _methods("Access", access_service, gate, access, WhoIs=reads),
            ]
        )
        public = tuple(own) if reflection else ()
        self.files = files(controller, reading)
        timings = controller.timings
        ranks = RankLeases(controller.shards, controller.nodes.count, timings.shard_silence, timings.rank_rest)
        nodes = NodesService(controller.nodes, ranks, door, timings.handshake)
        self._shards = ShardsService(controller, shards, door)
        own[_SHARDS] = {
            "Register": StreamMethod(pb.ShardReports, self._shards.register),
            "LeaseRank": StreamMethod(pb.NodeReport, nodes.lease),
            "FollowLayouts": StreamMethod(pb.NodeReport, nodes.follow),
            "Files": UnaryMethod(pb.FilesRequest, self.files.files, reading, proves=True),
            "Read": StreamMethod(pb.ReadRequest, self.files.read),
        }
        own[_HEALTH] = {"Check": UnaryMethod(health_pb2.HealthCheckRequest, self._health.Check, reads)}
        limits = max_silent_calls, max_strangers
        self._listener = Listener(address, own, gate, refusals, public, tls, timings, *limits, held)
        self.port, self.refused = self._listener.port, refusals.counts

    def stalled(self) -> float:
        """Return for how many seconds clients' heartbeats could not have run.

        Call it periodically: unless a probe is outstanding on the threads of heartbeats, it queues one.
        """
        if self._heard is None or self._heard.done():
            with contextlib.suppress(ServerUnavailableError):  # the listener is stopping
                self._asked, self._heard = time.monotonic(), self._listener.run(self._leases.run(_nothing))
            return 0.0
        return time.monotonic() - self._asked

    def set_ready(self, ready: bool) -> None:
        """Set what grpc.health.v1 answers: SERVING, or NOT_SERVING."""
        self._health.ready = ready

    def close(self, seconds: float) -> None:
        """Refuse new calls, give running ones `seconds`."""
        self._listener.close(seconds)
        self._shards.close()
        for threads in self._threads:
            threads.close()
