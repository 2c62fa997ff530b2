"""The gRPC services over the controller, with health and reflection."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from typing_extensions import override

from lora_server.control.adapters import Adapters, Listing
from lora_server.control.clients import MAX_WAITERS
from lora_server.control.controller import Controller
from lora_server.control.registry import Record
from lora_server.control.shards import ShardHandle
from lora_server.control.status import refusals, status
from lora_server.errors import LoraServerError
from lora_server.spec import PROJECTIONS
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import CODE_KEY, KEEPALIVE, status_of

MAX_WAIT_SECONDS = 600.0
RPC_THREADS = 64
SERVICES = ("Adapters", "Clients", "Server")
log = structlog.get_logger()
_T = TypeVar("_T")


def _abort(context: grpc.ServicerContext, error: LoraServerError) -> NoReturn:
    context.set_trailing_metadata(((CODE_KEY, error.code),))
    context.abort(status_of(error), str(error))
    raise AssertionError("abort raises")


def _guard(method: Callable[[Any, Any, grpc.ServicerContext], _T]) -> Callable[[Any, Any, grpc.ServicerContext], _T]:
    def guarded(self: Any, request: Any, context: grpc.ServicerContext) -> _T:
        try:
            return method(self, request, context)
        except LoraServerError as error:
            _abort(context, error)

    return guarded


class AdaptersService(rpc.AdaptersServicer):
    """The RPCs of this service, as the proto describes them."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    @override
    @_guard
    def Add(self, request: pb.AddAdapterRequest, context: grpc.ServicerContext) -> pb.Adapter:
        seconds = min(request.wait_seconds or 60.0, MAX_WAIT_SECONDS)
        record = self._adapters.add(request.name, request.uri, seconds)
        return _adapter(self._adapters.get(record.name))

    @override
    @_guard
    def List(self, request: pb.ListAdaptersRequest, context: grpc.ServicerContext) -> pb.ListAdaptersReply:
        adapters = [_adapter(listing) for listing in self._adapters.listings()]
        served = {one.name for one in adapters}  # whose refusals are among their warnings
        refused = [one for one in refusals(self._adapters) if one.name not in served]
        return pb.ListAdaptersReply(adapters=adapters, refused=refused)

    @override
    @_guard
    def Get(self, request: pb.GetAdapterRequest, context: grpc.ServicerContext) -> pb.Adapter:
        reply = _adapter(self._adapters.get(request.name))
        for shard, ready, host, layers in self._adapters.by_shard(request.name):
            reply.shards.add(shard=shard, ready=ready, host=host, layers=layers)
        return reply

    @override
    @_guard
    def Remove(self, request: pb.RemoveAdapterRequest, context: grpc.ServicerContext) -> pb.RemoveAdapterReply:
        return pb.RemoveAdapterReply(holders=self._adapters.remove(request.name))

    @override
    @_guard
    def Pin(self, request: pb.PinAdapterRequest, context: grpc.ServicerContext) -> pb.Adapter:
        self._adapters.pin(request.name, min(request.wait_seconds or 60.0, MAX_WAIT_SECONDS))
        return _adapter(self._adapters.get(request.name))

    @override
    @_guard
    def Unpin(self, request: pb.UnpinAdapterRequest, context: grpc.ServicerContext) -> pb.Adapter:
        self._adapters.unpin(request.name)
        return _adapter(self._adapters.get(request.name))


def _adapter(listing: Listing) -> pb.Adapter:
    record = listing.record
    return pb.Adapter(
        name=record.name,
        version=record.version,
        handle=record.handle,
        uri=record.path,
        lora_rank=record.lora_rank,
        bytes=record.nbytes,
        state=listing.state,
        resident_layers=listing.resident_layers,
        layers=listing.layers,
        warnings=listing.warnings,
        error=listing.error,
        holders=listing.holders,
        invocation=_invocation(record),
        pinned=record.pinned and listing.state != "draining",
    )


class ClientsService(rpc.ClientsServicer):
    """The RPCs of this service, as the proto describes them."""

    def __init__(self, controller: Controller, prefetch_address: str) -> None:
        self._controller, self._clients = controller, controller.clients
        self._prefetch_address = prefetch_address

    @override
    @_guard
    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.Lease:
        lease, live = self._clients.join(request.instance, request.served_names)
        agreement, hidden = self._controller.agreement, self._controller.adapters.listed(request.served_names)
        if hidden:
            log.error("an engine's base model hides adapters of its name", adapters=hidden, instance=request.instance)
        return pb.Lease(
            client=lease.client,
            epoch=lease.epoch,
            key=lease.key,
            lease_seconds=self._clients.leases.seconds,
            spec_json=agreement.spec.to_json(),
            layout=str(agreement.layout),
            dtype=agreement.dtype,
            coordination=agreement.coordination,
            max_step_rows=agreement.max_step_rows,
            endpoints=[handle.registration.endpoint for handle in live.values()],
            prefetch_address=self._prefetch_address,
            server=self._controller.arrivals.run,
            hidden_adapters=hidden,
            adapters=len(self._controller.adapters),
        )

    @override
    @_guard
    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        forgot = self._clients.renew(request.client, request.epoch, request.settled)
        return pb.HeartbeatReply(forgot=forgot, prefetch_address=self._prefetch_address)

    @override
    @_guard
    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        self._clients.end(request.client, request.epoch)
        return pb.LeaveReply()

    @override
    @_guard
    def Acquire(self, request: pb.AcquireRequest, context: grpc.ServicerContext) -> pb.AcquireReply:
        records, queued = self._clients.acquire(request.client, request.epoch, request.names, request.ticket)
        reply = pb.AcquireReply(adapters=[_held(record) for record in records])
        if queued is not None:
            reply.position, reply.reason = queued
        return reply

    @override
    @_guard
    def Await(self, request: pb.AwaitRequest, context: grpc.ServicerContext) -> pb.AwaitReply:
        waited = self._clients.wait_admitted(request.client, request.epoch, request.tickets, request.seconds)
        return pb.AwaitReply(tickets=waited)

    @override
    @_guard
    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelReply:
        self._clients.cancel(request.client, request.epoch, request.tickets)
        return pb.CancelReply()

    @override
    @_guard
    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        self._clients.release(request.client, request.epoch, request.handles)
        return pb.ReleaseReply()

    @override
    @_guard
    def Restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext) -> pb.RestoreReply:
        self._clients.restore(request.client, request.epoch, request.handles)
        return pb.RestoreReply()


def _held(record: Record) -> pb.HeldAdapter:
    sites = [site.layer * len(PROJECTIONS) + PROJECTIONS.index(site.projection) for site in record.sites]
    return pb.HeldAdapter(
        name=record.name,
        handle=record.handle,
        sites=sites,
        version=record.version,
        invocation=_invocation(record),
    )


def _invocation(record: Record) -> pb.Invocation | None:
    if record.invocation is None:
        return None
    return pb.Invocation(tokens=record.invocation.tokens, text=record.invocation.text)


class ServerService(rpc.ServerServicer):
    """The RPCs of this service, as the proto describes them."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @override
    @_guard
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return status(self._controller)


class ShardsService(rpc.ShardsServicer):
    """One stream per shard process: its reports come in, commands go out, its end is the shard's death."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @override
    def Register(
        self, request_iterator: Iterator[pb.ShardReport], context: grpc.ServicerContext
    ) -> Iterator[pb.ShardCommand]:
        try:
            registration = next(request_iterator, pb.ShardReport()).registration
            kept = [report.kept for report in itertools.islice(request_iterator, registration.kept)]
            handle = self._controller.arrivals.arrive(registration, kept)
        except LoraServerError as error:
            _abort(context, error)
        except grpc.RpcError:  # it went away while it registered
            return
        threading.Thread(target=self._reports, args=(handle, request_iterator), daemon=True).start()
        yield from handle.commands()

    def _reports(self, handle: ShardHandle, reports: Iterator[pb.ShardReport]) -> None:
        try:
            for report in reports:
                self._on_report(handle, report)
        except grpc.RpcError:
            log.debug("shard stream broke", shard=handle.shard)
        finally:
            self._controller.arrivals.depart(handle)

    def _on_report(self, handle: ShardHandle, report: pb.ShardReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "done":
            handle.finish(report.done)
        elif kind == "stats":
            self._controller.shards.update(handle, report.stats)
        elif kind == "residencies":
            self._controller.adapters.on_moved(handle.shard, report.residencies.moved)
        elif kind == "leaving":
            handle.leaving = True
        elif kind == "client_gone":
            self._controller.clients.end(report.client_gone.client, report.client_gone.epoch)


class ControlServer:
    """The listening gRPC server."""

    def __init__(self, controller: Controller, address: str, prefetch_address: str) -> None:
        threads = RPC_THREADS + MAX_WAITERS + controller.agreement.layout.num_shards  # a stream occupies one for good
        pool = futures.ThreadPoolExecutor(threads, thread_name_prefix="rpc")
        # without so_reuseport=0 a second server on the same port would start, and clients land on either
        self._server = grpc.server(pool, options=(*KEEPALIVE, ("grpc.so_reuseport", 0)))
        rpc.add_AdaptersServicer_to_server(AdaptersService(controller.adapters), self._server)
        rpc.add_ClientsServicer_to_server(ClientsService(controller, prefetch_address), self._server)
        rpc.add_ServerServicer_to_server(ServerService(controller), self._server)
        rpc.add_ShardsServicer_to_server(ShardsService(controller), self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [pb.DESCRIPTOR.services_by_name[name].full_name for name in SERVICES]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.port = self._server.add_insecure_port(address)
        self.set_ready(False)
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """What grpc.health.v1 answers."""
        status = health_pb2.HealthCheckResponse
        self._health.set("", status.SERVING if ready else status.NOT_SERVING)

    def close(self, seconds: float) -> None:
        """Refuse new calls, give running ones `seconds`."""
        self._server.stop(seconds).wait()
