"""Scopes: a caller's names become full names, and answers hide the adapters that the caller may not see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from lora_server.access import limits
from lora_server.access.gate import Gate
from lora_server.access.identity import Identity
from lora_server.access.store import Tenant
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.adapters.catalog import name_of
from lora_server.control.adapters.records import Record, split_version
from lora_server.control.adapters.resolver import Resolver
from lora_server.control.adapters.rollout import CheckReplaced
from lora_server.control.admission.service import CheckInUse
from lora_server.control.controller import Controller
from lora_server.control.members.leases import ClientLease
from lora_server.errors import LeaseError, LimitError, PermissionDeniedError, UnknownAdapterError
from lora_server.wire import lora_server_pb2 as pb

MOST_KNOWN = 8  # names that an error lists


class Scopes:
    """Makes the scopes of calls, and adds and shares adapters for tenants."""

    def __init__(self, controller: Controller, gate: Gate, resolver: Resolver | None = None) -> None:
        """`resolver`: where unknown names are resolved, with --resolve."""
        self.gate, self.controller, self._adapters = gate, controller, controller.adapters
        self.resolver = resolver

    def of(self, who: Identity, on_behalf_of: str = "") -> Scope:
        """Return the scope of a caller, or of the tenant that it acts on behalf of. Raises PermissionDeniedError."""
        return Scope(self, self.gate.acting(who, on_behalf_of))

    def add(
        self,
        tenant: Tenant,
        full: str,
        uri: str,
        seconds: float,
        allowed: Allowed | None = None,
        slo_class: str | None = None,
    ) -> Record:
        """Add an adapter to a tenant's, and remove it again if it exceeds the tenant's bytes. See AdapterRollout.add;
        raises LimitError."""
        with self.gate.limits.adding(tenant, full) as added:
            names, nbytes = self._has(tenant.name)
            limits.check_adapters(tenant, len(names | added))
            limits.check_bytes(tenant, nbytes)
            record = self._adapters.rollout.add(full, uri, seconds, allowed, slo_class)
            try:
                limits.check_bytes(tenant, self._has(tenant.name)[1])
            except LimitError:
                self._adapters.rollout.remove(full)
                raise
            return record

    def bring(self, who: Identity, full: str, uri: str, seconds: float) -> None:
        """Add an adapter from the URL that --resolve gives: it counts towards its owner's limits, and the audit log
        names the caller. Raises LimitError."""
        self.add(self.gate.tenant(self.gate.names.owner(full)), full, uri, seconds)
        self.gate.changed(who, "Adapters/Add", f"name={full} by --resolve")

    @contextmanager
    def updating(self, who: Identity, full: str) -> Iterator[CheckReplaced]:
        """Reserve an update's place within its tenant's limits. The yielded check raises LimitError if the new version
        exceeds the tenant's bytes; draining versions count, but not the one that is replaced. Raises LimitError."""
        if not who.tenant:
            yield lambda served, new: None
            return
        tenant = self.gate.tenant(who.tenant)
        self.gate.limits.check_rate(tenant)
        with self.gate.limits.adding(tenant, full):
            yield lambda served, new: limits.check_bytes(tenant, self._has(tenant.name)[1] - served.nbytes + new.nbytes)

    def _has(self, tenant: str) -> tuple[set[str], int]:
        """Return the names of a tenant's adapters, and their total bytes."""
        own = [one for one in self._adapters.catalog.records() if self.gate.names.owner(one.name) == tenant]
        return {one.name for one in own}, sum(one.nbytes for one in own)

    def check_still_good(self, lease: ClientLease) -> None:
        """End a lease if its token was revoked while the client joined; raises LeaseError then."""
        if not self.gate.is_good(*lease.engine.credentials):
            self.controller.clients.end(lease.client, lease.epoch)
            raise LeaseError(f"client {lease.client}: its token was revoked; join with another")

    def forget(self, full: str, who: Identity) -> None:
        """Remove the shares of an adapter that is gone, so that the next one of its name is not shared."""
        if self.gate.store is not None and full in self.gate.names.shared:
            self.gate.store.share(full, "", True, who)
            self.gate.cache.refresh()

    def find(self, who: Identity, name: str) -> str:
        """Return the full name of an adapter that a caller names; raises UnknownAdapterError."""
        scope = self.of(who)
        full = scope.find(name)
        with scope.asking([name], [full]):
            return self._adapters.listings.get(full).record.name

    def begin_with(self, start: str) -> bool:
        """Return whether any adapter's full name begins with `start`."""
        return bool(self._adapters.listings.after((start, 0), 1, lambda name: name.startswith(start)))


class Scope:
    """The view of one call: names, rights and answers of its caller."""

    def __init__(self, scopes: Scopes, who: Identity) -> None:
        self.who, self.gate, self.tenant = who, scopes.gate, scopes.gate.tenant(who.tenant)
        self._scopes, self._adapters, self._names = scopes, scopes.controller.adapters, scopes.gate.names

    def sees(self, full: str) -> bool:
        """Return whether the caller may know of an adapter."""
        return self.who.sees_all or self._names.sees(self.who.tenant, full)

    def owns(self, full: str) -> bool:
        """Return whether the caller may change an adapter."""
        return self.who.is_operator or self._names.owner(full) == self.who.tenant

    @property
    def num_seen(self) -> int:
        """Return how many adapters the caller may know of."""
        return sum(self.sees(record.name) for record in self._adapters.catalog.records())

    def own(self, name: str) -> str:
        """Return the full name of a new adapter of the caller's."""
        return self._names.own(self.who.tenant, name)

    def find(self, name: str) -> str:
        """Return the full name that a name means to the caller; no adapter of it need exist. Raises
        UnknownAdapterError if the caller could not see it."""
        if self.who.sees_all:
            return name
        own, _ = split_version(name)
        meant = self._names.meant(self.who.tenant, own)
        if not meant:
            raise self._unknown(own)
        return next(iter(self._adapters.listings.known(meant)), meant[0]) + name[len(own) :]

    def bring(self, full: Sequence[str]) -> None:
        """Start adding the names that are not registered, if the server has --resolve. Raises ServerBusyError while
        that runs, UnknownAdapterError or LimitError after it failed."""
        if (resolver := self._scopes.resolver) is not None:
            self._adapters.catalog.start.require_settled()
            for name in sorted({*full}.difference(self._adapters.listings.known(full))):
                resolver.ask(name, partial(self._scopes.bring, self.who))

    def reviving(self, full: Iterable[str]) -> AbstractContextManager[None]:
        """See AdapterRollout.reviving."""
        return self._adapters.rollout.reviving(full)

    @contextmanager
    def asking(self, names: Sequence[str], full: Sequence[str]) -> Iterator[None]:
        """Rewrite an UnknownAdapterError of the block so that it names only adapters that the caller sees."""
        try:
            yield
        except UnknownAdapterError:
            known = set(self._adapters.listings.known(full))
            missing = [name for name, one in zip(names, full, strict=True) if one not in known]
            if self.who.sees_all or not missing:
                raise
            raise self._unknown(missing[0]) from None

    def _unknown(self, name: str) -> UnknownAdapterError:
        found = (place[0] for place, _ in self._adapters.listings.after(("", 0), MOST_KNOWN, self.sees))
        known = ", ".join(dict.fromkeys(found)) or "none"
        return UnknownAdapterError(f"adapter {name[:200]!r}: not registered here (known: {known}); add it first")

    def find_own(self, name: str) -> str:
        """Return the full name of an adapter that the caller may change. Raises UnknownAdapterError, and
        PermissionDeniedError for one that is only shared with it."""
        full = self.find(name)
        if self.owns(full):
            return full
        if not self._adapters.listings.known([full]):
            raise self._unknown(name)
        raise PermissionDeniedError(f"adapter {name!r}: belongs to another tenant; expected one of {self.who.tenant}")

    def check_acquire(self, full: Sequence[str]) -> CheckInUse | None:
        """Check an acquire against the tenant's rate now, and return a check of its active adapters, None if they are
        unlimited. Both raise LimitError."""
        tenant = self.tenant
        self.gate.limits.check_rate(tenant)

        def check(in_use: set[str]) -> None:
            active, asked = (
                {one for one in names if self._names.owner(one) == tenant.name} for names in (in_use, full)
            )
            if asked - active:
                limits.check_active(tenant, len(asked | active))

        return check if tenant.max_active else None

    def hidden(self, served_names: Iterable[str]) -> list[str]:
        """Return the adapters that an engine cannot be asked for, since its base model is served under their names."""
        meant = (full for name in served_names for full in self._names.meant(self.who.tenant, name))
        return [full for full in meant if self._adapters.catalog.find(full) is not None]

    def held_before(self, handles: Iterable[int]) -> list[int]:
        """Return which of these handles the caller may hold. An engine of the operator holds all tenants' adapters."""
        if self.who.is_operator:
            return list(handles)
        names = ((handle, name_of(self._adapters.catalog, handle)) for handle in handles)
        return [handle for handle, name in names if name is not None and self.sees(name)]

    def check_lease(self, lease: ClientLease | None) -> None:
        """Raise LeaseError if a lease was made with another token than the caller's."""
        if lease is not None and lease.engine.credentials != (self.who.tenant, self.who.token):
            raise LeaseError(f"client {lease.client}: its lease was made with another token; join with this one")


def cut_adapter(scope: Scope, adapter: pb.Adapter) -> pb.Adapter:
    """Remove from an answer where the server keeps an adapter's files, and the other clients that use it."""
    if not scope.who.is_operator:
        adapter.ClearField("uri")
        if not scope.owns(adapter.name):
            adapter.ClearField("holders")
            adapter.ClearField("warnings")
            adapter.ClearField("error")
    return adapter


def cut_page(scope: Scope, page: pb.ListAdaptersReply) -> pb.ListAdaptersReply:
    """Remove the same from each adapter of a page, and the URIs of its refusals."""
    for adapter in page.adapters:
        cut_adapter(scope, adapter)
    if not scope.who.is_operator:
        for refusal in page.refused:
            refusal.ClearField("uri")
    return page


def cut_status(scope: Scope, status: pb.StatusReply) -> pb.StatusReply:
    """Keep what a tenant, or an engine, may know of the server: whether it serves, and what it serves."""
    if scope.who.sees_all:
        return status
    kept = pb.StatusReply(model=status.model, layout=status.layout, ready=status.ready, run=status.run)
    kept.reason, kept.adapters = "" if status.ready else "not ready", scope.num_seen
    for shard in status.shards:
        place = {"stage": shard.stage, "ep_rank": shard.ep_rank, "replica": shard.replica}
        kept.shards.add(shard=shard.shard, **place, state=shard.state)
    return kept
