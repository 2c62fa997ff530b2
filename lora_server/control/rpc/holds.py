"""Acquire, Release and Cancel with a proven lease: each a call of its own, or an entry of Hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lora_server.access.identity import Identity
from lora_server.control.adapters.records import Record, split_version
from lora_server.control.clients import AdapterRequests
from lora_server.control.reports.listing import invocation
from lora_server.control.rpc.calls import Refusals, cut, expected, observed
from lora_server.control.rpc.scope import Scopes
from lora_server.errors import LoraServerError, PermissionDeniedError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Proof


class HoldCalls:
    """The calls by which clients hold adapters. Thread-safe."""

    def __init__(self, requests: AdapterRequests, scopes: Scopes, refusals: Refusals) -> None:
        self._requests, self._scopes, self._refusals = requests, scopes, refusals

    def acquire(self, request: pb.AcquireRequest, proof: Proof, who: Identity) -> pb.AcquireReply:
        """Hold adapters, or queue for them. NAME@DIGEST names one version, whatever the name means by now."""
        scope = self._scopes.of(who, request.on_behalf_of)
        full = [scope.find(name) for name in request.names]
        own, asked = ([split_version(name)[0] for name in names] for names in (full, request.names))
        is_new = self._requests.is_new(proof, request.ticket)
        check = scope.check_acquire(own) if is_new else None  # a ticket that is asked for again counts once
        with scope.asking(asked, own):
            scope.bring(own)
            tenant, pace = scope.tenant, request.pace_us * 1e-6 if request.HasField("pace_us") else None
            whose = tenant.name, tenant.weight, check, pace, tenant.slo_class
            with scope.reviving(full):
                answer = self._requests.acquire(proof, full, request.ticket, *whose)
        shown = dict(zip(own, asked, strict=True))
        held = [_held(record, shown.get(record.name, record.name)) for record in answer.records]
        reply = pb.AcquireReply(adapters=held, loading=answer.loading is not None)
        if answer.queued is not None:
            reply.position, reply.reason = answer.queued
        if answer.loading is not None and answer.loading < math.inf:
            reply.expected_us = int(answer.loading * 1e6)
        return reply

    def release(self, request: pb.ReleaseRequest, proof: Proof) -> pb.ReleaseReply:
        """Release handles."""
        self._requests.release(proof, request.handles)
        return pb.ReleaseReply()

    def cancel(self, request: pb.CancelRequest, proof: Proof) -> pb.CancelReply:
        """Cancel tickets."""
        self._requests.cancel(proof, request.tickets)
        return pb.CancelReply()

    def hold(self, entries: Iterable[pb.HoldEntry], proof: Proof, who: Identity) -> pb.HoldReply:
        """Make the calls of these entries, in their order. Raises LeaseError before the first of them."""
        with self._requests.together(proof):
            return pb.HoldReply(answers=[self._answer(entry, proof, who) for entry in entries])

    def _answer(self, entry: pb.HoldEntry, proof: Proof, who: Identity) -> pb.HoldAnswer:
        kind = entry.WhichOneof("entry") or "acquire"
        method, parent = kind.capitalize(), {"traceparent": entry.traceparent} if entry.traceparent else {}
        try:
            with observed(method, entry.request, parent), self._noted(method, who):
                if kind == "acquire":
                    return pb.HoldAnswer(acquired=self.acquire(entry.acquire, proof, who))
                if kind == "release":
                    self.release(entry.release, proof)
                else:
                    self.cancel(entry.cancel, proof)
                return pb.HoldAnswer()
        except LoraServerError as error:
            return pb.HoldAnswer(code=error.code, message=cut(str(error)))

    @contextmanager
    def _noted(self, method: str, who: Identity) -> Iterator[None]:
        """Note a refusal of the block as one of a call is noted."""
        try:
            yield
        except Exception as raised:
            error = expected(raised)
            self._refusals.note(method, error.code, cut(str(error)))
            if isinstance(error, PermissionDeniedError):
                self._scopes.gate.audit.note(who, f"Clients/{method}", "", error)
            raise error from None


def _held(record: Record, asked: str) -> pb.HeldAdapter:
    return pb.HeldAdapter(
        name=asked,
        handle=record.handle,
        sites=record.site_codes,
        version=record.version,
        invocation=invocation(record),
    )
