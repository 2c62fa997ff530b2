"""The controller's gRPC services, one method per RPC. `server` decides their address and threads."""

from __future__ import annotations

import math
from hmac import compare_digest
from typing import Any

import structlog
from grpc_health.v1 import health_pb2

from lora_server.access.identity import Identity
from lora_server.control.adapters.records import record_of
from lora_server.control.controller import Controller
from lora_server.control.members.leases import EngineTraits, heartbeat_pause
from lora_server.control.reports.listing import adapter, page
from lora_server.control.reports.status import status
from lora_server.control.rpc.calls import Refusals
from lora_server.control.rpc.holds import HoldCalls
from lora_server.control.rpc.scope import Scopes, cut_adapter, cut_page, cut_status
from lora_server.errors import AdapterExistsError, PermissionDeniedError, ProtocolError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.proofs import lend
from lora_server.wire.terms import Proof

MAX_WAIT_SECONDS = 600.0
log = structlog.get_logger()


class AdaptersService:
    """The RPCs of Adapters, as the proto describes them. Callers' names become full names here."""

    def __init__(self, controller: Controller, scopes: Scopes) -> None:
        self._adapters, self._scopes, self._dtype = controller.adapters, scopes, controller.agreement.dtype
        self._leases, self._allowed = controller.clients.leases, controller.adapters.rollout.allowed

    def Add(self, request: pb.AddAdapterRequest, who: Identity) -> pb.Adapter:
        seconds, slo_class = _wait_seconds(request), request.slo_class if request.HasField("slo_class") else None
        if who.is_operator:
            added = self._adapters.rollout.add(request.name, request.uri, seconds, slo_class=slo_class)
            return self._shown(added.name, who)
        allowed = self._allowed.within(who.tenant)
        allowed.check(request.uri)
        if self._leases.serving(request.name, who.tenant) is not None:
            raise AdapterExistsError(
                f"adapter {request.name!r}: an engine serves its base model under this name; take another name"
            )
        scope = self._scopes.of(who)
        self._scopes.gate.limits.check_rate(scope.tenant)
        full = scope.own(request.name)
        return self._shown(self._scopes.add(scope.tenant, full, request.uri, seconds, allowed, slo_class).name, who)

    def List(self, request: pb.ListAdaptersRequest, who: Identity) -> pb.ListAdaptersReply:
        scope = self._scopes.of(who, request.on_behalf_of)
        found = page(self._adapters.listings, request.page_token, request.page_size, scope.sees)
        found.dtype = self._dtype
        return cut_page(scope, found)

    def Get(self, request: pb.GetAdapterRequest, who: Identity) -> pb.Adapter:
        scope = self._scopes.of(who, request.on_behalf_of)
        full = scope.find(request.name)
        with scope.asking([request.name], [full]):
            scope.bring(() if request.registered else [full])
            reply = cut_adapter(scope, adapter(self._adapters.listings.get(full)))
            for shard, ready, host, layers, remote in self._adapters.listings.by_shard(full):
                reply.shards.add(shard=shard, ready=ready, host=host, layers=layers, remote=remote)
            if scope.owns(full):
                for one in self._adapters.listings.versions(full):
                    uri = record_of(one).uri if who.is_operator else ""
                    reply.versions.add(version=one.version, uri=uri, added=one.added, listed=one.listed)
        return reply

    def Remove(self, request: pb.RemoveAdapterRequest, who: Identity) -> pb.RemoveAdapterReply:
        scope = self._scopes.of(who)
        full = scope.find_own(request.name)
        with scope.asking([request.name], [full]):
            holders = self._adapters.rollout.remove(full, _drain_seconds(request))
        self._scopes.forget(full, who)
        return pb.RemoveAdapterReply(holders=holders)

    def Update(self, request: pb.UpdateAdapterRequest, who: Identity) -> pb.Adapter:
        seconds = _wait_seconds(request)
        scope = self._scopes.of(who)
        full = scope.find_own(request.name)
        allowed = self._allowed if who.is_operator else self._allowed.within(who.tenant)
        with scope.asking([request.name], [full]):
            allowed.check(request.uri)
            with self._scopes.updating(who, full) as check:
                self._adapters.rollout.update(full, request.uri, seconds, _drain_seconds(request), check, allowed)
        return self._shown(full, who)

    def Rollback(self, request: pb.RollbackAdapterRequest, who: Identity) -> pb.Adapter:
        seconds = _wait_seconds(request)
        scope = self._scopes.of(who)
        full = scope.find_own(request.name)
        with scope.asking([request.name], [full]), self._scopes.updating(who, full) as check:
            self._adapters.rollout.rollback(full, request.version, seconds, _drain_seconds(request), check)
        return self._shown(full, who)

    def Pin(self, request: pb.PinAdapterRequest, who: Identity) -> pb.Adapter:
        self._adapters.rollout.pin(request.name, _wait_seconds(request))
        return self._shown(request.name, who)

    def Unpin(self, request: pb.UnpinAdapterRequest, who: Identity) -> pb.Adapter:
        self._adapters.rollout.unpin(request.name)
        return self._shown(request.name, who)

    def _shown(self, full: str, who: Identity) -> pb.Adapter:
        return cut_adapter(self._scopes.of(who), adapter(self._adapters.listings.get(full)))


class ClientsService:
    """The RPCs of Clients, as the proto describes them. A lease is valid only with the token that it was made with."""

    def __init__(self, controller: Controller, scopes: Scopes, refusals: Refusals) -> None:
        self._controller, self._clients, self._scopes = controller, controller.clients, scopes
        self._requests, self._holds = controller.requests, HoldCalls(controller.requests, scopes, refusals)

    def Join(self, request: pb.JoinRequest, who: Identity) -> pb.Lease:
        tenant, agreement = self._scopes.gate.tenant(who.tenant), self._controller.agreement
        classes = self._controller.adapters.admission.classes
        slo = classes.of_engine(request.slo_class, tenant.slo_class, agreement.spec)
        asked = request.place if request.HasField("place") else None
        if asked is not None and not who.is_operator:
            raise PermissionDeniedError(
                f"transport nvshmem: got an engine of tenant {who.tenant}, expected the operator's: every PE of its "
                "world can write to every other's memory; attach with transport='tcp'"
            )
        engine = EngineTraits(tuple(request.served_names), who.tenant, who.token, slo.name, request.merged)
        lease, live = self._clients.join(request.instance, engine, asked, request.pushes, tenant.weight, slo.step_us)
        if any(handle.generation != agreement.generation for handle in live.values()):
            self._clients.end(lease.client, lease.epoch)
            raise ServerUnavailableError("the server was resized meanwhile: join again")
        self._scopes.check_still_good(lease)
        hidden = self._scopes.of(who).hidden(request.served_names)
        catalog = self._controller.adapters.catalog
        if hidden:
            log.error("an engine's base model hides adapters of its name", adapters=hidden, instance=request.instance)
        return pb.Lease(
            client=lease.client,
            epoch=lease.epoch,
            key=lease.proof.key,
            lease_seconds=self._clients.leases.seconds,
            spec_json=agreement.spec.to_json(),
            layout=str(agreement.layout),
            dtype=agreement.dtype,
            coordination=agreement.coordination,
            max_step_rows=agreement.max_step_rows,
            endpoints=[handle.registration.endpoint for handle in live.values()],
            server=self._controller.arrivals.run,
            hidden_adapters=hidden,
            adapters=len(catalog.records()) if who.is_operator else 0,
            wire=agreement.wire,
            place=lease.place,
            slo_class=slo.name,
            generation=agreement.generation,
            base_weights=agreement.base_weights,
            replicas=agreement.layout.replicas,
            replica=max(0, lease.replica),
            failover_us=agreement.failover_ms * 1000,
        )

    def World(self, request: pb.WorldRequest, who: Identity) -> pb.Place:
        return self._clients.place_of(self._own(request, who))

    def Heartbeat(self, request: pb.HeartbeatRequest, who: Identity) -> pb.HeartbeatReply:
        proof = self._own(request, who)
        forgot = self._clients.heartbeat(proof, request.settled, request.waits, request.generation)
        up = self._clients.twins.offer(proof.client, request.lacking, request.generation)
        level = [one for one in up if not self._controller.adapters.admission.is_behind(one.shard)]
        endpoints = [one.registration.endpoint for one in level]
        move = self._controller.resize.move_for(proof, request.generation)
        pause = heartbeat_pause(len(self._clients.leases), self._clients.leases.seconds)
        pause = 0.0 if self._controller.resize.status().state else pause  # heartbeats tell clients to move
        return pb.HeartbeatReply(forgot=forgot, endpoints=endpoints, move=move, pause=pause)

    def Leave(self, request: pb.LeaveRequest, who: Identity) -> pb.LeaveReply:
        self._clients.leave(self._own(request, who), request.unanswered)
        return pb.LeaveReply()

    def Acquire(self, request: pb.AcquireRequest, who: Identity) -> pb.AcquireReply:
        return self._holds.acquire(request, self._own(request, who), who)

    def Await(self, request: pb.AwaitRequest, who: Identity) -> pb.AwaitReply:
        waited = self._requests.wait_admitted(self._own(request, who), request.tickets, request.seconds)
        return pb.AwaitReply(tickets=waited)

    def Cancel(self, request: pb.CancelRequest, who: Identity) -> pb.CancelReply:
        return self._holds.cancel(request, self._own(request, who))

    def Release(self, request: pb.ReleaseRequest, who: Identity) -> pb.ReleaseReply:
        return self._holds.release(request, self._own(request, who))

    def Hold(self, request: pb.HoldRequest, who: Identity) -> pb.HoldReply:
        return self._holds.hold(request.entries, self._own(request, who), who)

    def Prefetch(self, request: pb.PrefetchRequest, who: Identity) -> pb.PrefetchReply:
        self._requests.prefetch(self._own(request, who), {need.handle: need.in_us for need in request.needs})
        return pb.PrefetchReply()

    def Restore(self, request: pb.RestoreRequest, who: Identity) -> pb.RestoreReply:
        proof = self._own(request, who)
        self._requests.restore(proof, self._scopes.of(who).held_before(request.handles))
        return pb.RestoreReply()

    def Borrow(self, request: pb.BorrowRequest, who: Identity) -> pb.BorrowReply:
        borrower, told, leases = self._own(request, who), request.holder, self._clients.leases
        holder = leases.find(told.client, told.epoch)
        lent = holder is not None and compare_digest(told.mac, lend(holder.proof.key, borrower.client, borrower.epoch))
        lender = Proof(told.client, told.epoch, holder.proof.key if holder is not None and lent else b"")
        self._scopes.of(who).check_lease(leases.proven(lender))
        self._clients.borrow(borrower, lender)
        return pb.BorrowReply()

    def _own(self, request: Any, who: Identity) -> Proof:
        """Return the proof of the lease that signed a request. Raises LeaseError if it was made with another token."""
        proof = self._clients.leases.proof_of(request)
        self._scopes.of(who).check_lease(self._clients.leases.proven(proof))
        return proof


def _wait_seconds(
    request: pb.AddAdapterRequest | pb.UpdateAdapterRequest | pb.RollbackAdapterRequest | pb.PinAdapterRequest,
) -> float:
    """Return how long a call may last, 60 s if the request does not say. Raises ProtocolError unless it is finite."""
    if not math.isfinite(request.wait_seconds):
        raise ProtocolError(f"wait_seconds: got {request.wait_seconds}, expected 0 to {MAX_WAIT_SECONDS:g}")
    return min(max(0.0, request.wait_seconds) or 60.0, MAX_WAIT_SECONDS)


def _drain_seconds(
    request: pb.RemoveAdapterRequest | pb.UpdateAdapterRequest | pb.RollbackAdapterRequest,
) -> float | None:
    return request.drain_seconds if request.HasField("drain_seconds") else None


class ServerService:
    """The RPCs of Server, as the proto describes them."""

    def __init__(self, controller: Controller, scopes: Scopes) -> None:
        self._controller, self._scopes = controller, scopes

    def Status(self, request: pb.StatusRequest, who: Identity) -> pb.StatusReply:
        return cut_status(self._scopes.of(who), status(self._controller))

    def Drain(self, request: pb.DrainRequest, who: Identity) -> pb.DrainReply:
        drain = self._controller.drain
        if request.HasField("shard"):
            drain.restart(request.shard, request.seconds)
            return pb.DrainReply()
        return pb.DrainReply(held=drain.begin(request.seconds))

    def Resume(self, request: pb.ResumeRequest, who: Identity) -> pb.ResumeReply:
        self._controller.drain.resume()
        return pb.ResumeReply()

    def Resize(self, request: pb.ResizeRequest, who: Identity) -> pb.ResizeReply:
        return self._controller.resize.run(request.layout, request.seconds)


class HealthService:
    """The Check RPC of grpc.health.v1, which probes use; it needs no token. Watch is not offered."""

    def __init__(self) -> None:
        self.ready = False

    def Check(self, request: health_pb2.HealthCheckRequest, who: Identity) -> health_pb2.HealthCheckResponse:
        answers = health_pb2.HealthCheckResponse
        if request.service:
            return answers(status=answers.SERVICE_UNKNOWN)
        return answers(status=answers.SERVING if self.ready else answers.NOT_SERVING)
