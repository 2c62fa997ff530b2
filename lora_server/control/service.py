"""What the controller answers over gRPC, message by message: `server` says where, and on which threads."""

from __future__ import annotations

import structlog
from grpc_health.v1 import health_pb2

from lora_server.control.controller import Controller
from lora_server.control.listing import adapter, invocation, page
from lora_server.control.registry import Record, record_of
from lora_server.control.status import status
from lora_server.control.updates import UpdatedAdapters
from lora_server.spec import PROJECTIONS
from lora_server.transport.session import Proof
from lora_server.wire import lora_server_pb2 as pb

MAX_WAIT_SECONDS = 600.0
log = structlog.get_logger()


class AdaptersService:
    """The RPCs of this service, as the proto describes them."""

    def __init__(self, adapters: UpdatedAdapters) -> None:
        self._adapters = adapters

    def Add(self, request: pb.AddAdapterRequest) -> pb.Adapter:
        seconds = min(request.wait_seconds or 60.0, MAX_WAIT_SECONDS)
        record = self._adapters.add(request.name, request.uri, seconds)
        return adapter(self._adapters.get(record.name))

    def List(self, request: pb.ListAdaptersRequest) -> pb.ListAdaptersReply:
        return page(self._adapters, request.page_token, request.page_size)

    def Get(self, request: pb.GetAdapterRequest) -> pb.Adapter:
        reply = adapter(self._adapters.get(request.name, brings=not request.registered))
        for shard, ready, host, layers, remote in self._adapters.by_shard(request.name):
            reply.shards.add(shard=shard, ready=ready, host=host, layers=layers, remote=remote)
        for one in self._adapters.versions(request.name):
            uri = record_of(one).uri
            reply.versions.add(version=one.version, uri=uri, added=one.added, listed=one.listed)
        return reply

    def Remove(self, request: pb.RemoveAdapterRequest) -> pb.RemoveAdapterReply:
        return pb.RemoveAdapterReply(holders=self._adapters.remove(request.name, _drain_seconds(request)))

    def Update(self, request: pb.UpdateAdapterRequest) -> pb.Adapter:
        seconds = min(request.wait_seconds or 60.0, MAX_WAIT_SECONDS)
        self._adapters.update(request.name, request.uri, seconds, _drain_seconds(request))
        return adapter(self._adapters.get(request.name))

    def Rollback(self, request: pb.RollbackAdapterRequest) -> pb.Adapter:
        seconds = min(request.wait_seconds or 60.0, MAX_WAIT_SECONDS)
        self._adapters.rollback(request.name, request.version, seconds, _drain_seconds(request))
        return adapter(self._adapters.get(request.name))

    def Pin(self, request: pb.PinAdapterRequest) -> pb.Adapter:
        self._adapters.pin(request.name, min(request.wait_seconds or 60.0, MAX_WAIT_SECONDS))
        return adapter(self._adapters.get(request.name))

    def Unpin(self, request: pb.UnpinAdapterRequest) -> pb.Adapter:
        self._adapters.unpin(request.name)
        return adapter(self._adapters.get(request.name))


class ClientsService:
    """The RPCs of this service, as the proto describes them."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self._clients = controller, controller.clients

    def Join(self, request: pb.JoinRequest) -> pb.Lease:
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
            server=self._controller.arrivals.run,
            hidden_adapters=hidden,
            adapters=len(self._controller.adapters),
            wire=agreement.wire,
        )

    def Heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        forgot = self._clients.heartbeat(_proof(request.proof), request.settled)
        return pb.HeartbeatReply(forgot=forgot)

    def Leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        self._clients.leave(_proof(request.proof))
        return pb.LeaveReply()

    def Acquire(self, request: pb.AcquireRequest) -> pb.AcquireReply:
        records, queued = self._clients.acquire(_proof(request.proof), request.names, request.ticket)
        reply = pb.AcquireReply(adapters=[_held(record) for record in records])
        if queued is not None:
            reply.position, reply.reason = queued
        return reply

    def Await(self, request: pb.AwaitRequest) -> pb.AwaitReply:
        waited = self._clients.wait_admitted(_proof(request.proof), request.tickets, request.seconds)
        return pb.AwaitReply(tickets=waited)

    def Cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        self._clients.cancel(_proof(request.proof), request.tickets)
        return pb.CancelReply()

    def Release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        self._clients.release(_proof(request.proof), request.handles)
        return pb.ReleaseReply()

    def Prefetch(self, request: pb.PrefetchRequest) -> pb.PrefetchReply:
        self._clients.prefetch(_proof(request.proof), {need.handle: need.in_us for need in request.needs})
        return pb.PrefetchReply()

    def Restore(self, request: pb.RestoreRequest) -> pb.RestoreReply:
        self._clients.restore(_proof(request.proof), request.handles)
        return pb.RestoreReply()

    def Borrow(self, request: pb.BorrowRequest) -> pb.BorrowReply:
        self._clients.borrow(_proof(request.proof), _proof(request.holder))
        return pb.BorrowReply()


def _drain_seconds(
    request: pb.RemoveAdapterRequest | pb.UpdateAdapterRequest | pb.RollbackAdapterRequest,
) -> float | None:
    return request.drain_seconds if request.HasField("drain_seconds") else None


def _proof(told: pb.Proof) -> Proof:
    return Proof(told.client, told.epoch, told.key)


def _held(record: Record) -> pb.HeldAdapter:
    sites = [site.layer * len(PROJECTIONS) + PROJECTIONS.index(site.projection) for site in record.sites]
    return pb.HeldAdapter(
        name=record.name,
        handle=record.handle,
        sites=sites,
        version=record.version,
        invocation=invocation(record),
    )


class ServerService:
    """The RPCs of this service, as the proto describes them."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def Status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return status(self._controller)

    def Drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        drain = self._controller.drain
        if request.HasField("shard"):
            drain.restart(request.shard, request.seconds)
            return pb.DrainReply()
        return pb.DrainReply(held=drain.begin(request.seconds))

    def Resume(self, request: pb.ResumeRequest) -> pb.ResumeReply:
        self._controller.drain.resume()
        return pb.ResumeReply()


class HealthService:
    """grpc.health.v1, as far as probes use it: whoever asks is answered, nobody is told later."""

    def __init__(self) -> None:
        self.ready = False

    def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        answers = health_pb2.HealthCheckResponse
        if request.service:
            return answers(status=answers.SERVICE_UNKNOWN)
        return answers(status=answers.SERVING if self.ready else answers.NOT_SERVING)
