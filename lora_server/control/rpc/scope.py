"""What a caller sees of the adapters: names as it says them become full names, and of others' it learns nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from lora_server.access import limits
from lora_server.access.gate import Gate
from lora_server.access.identity import Identity
from lora_server.access.store import Tenant
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.adapters.catalog import name_of
from lora_server.control.adapters.records import Record
from lora_server.control.adapters.rollout import CheckReplaced
from lora_server.control.admission.service import CheckInUse
from lora_server.control.controller import Controller
from lora_server.control.members.leases import ClientLease
from lora_server.errors import LeaseError, LimitError, PermissionDeniedError, UnknownAdapterError
from lora_server.wire import lora_server_pb2 as pb

MOST_KNOWN = 8  # names that an error says


class Scopes:
    """Of all callers."""

    def __init__(self, controller: Controller, gate: Gate) -> None:
        self.gate, self.controller, self._adapters = gate, controller, controller.adapters

    def of(self, who: Identity, on_behalf_of: str = "") -> Scope:
        """A caller's, or whom its call is for; raises PermissionDeniedError."""
        return Scope(self, self.gate.acting(who, on_behalf_of))

    def add(self, tenant: Tenant, full: str, uri: str, seconds: float, allowed: Allowed | None = None) -> Record:
        """Add an adapter to a tenant's; one of too many bytes is taken back. See Adapters.add; raises LimitError."""
        with self.gate.limits.adding(tenant, full) as added:
            names, nbytes = self._has(tenant.name)
            limits.check_adapters(tenant, len(names | added))
            limits.check_bytes(tenant, nbytes)
            record = self._adapters.rollout.add(full, uri, seconds, allowed)
            try:
                limits.check_bytes(tenant, self._has(tenant.name)[1])
            except LimitError:
                self._adapters.rollout.remove(full)
                raise
            return record

    def bring(self, who: Identity, full: str, uri: str, seconds: float) -> None:
        """Add what a caller asked for, from where --resolve says that it is: it counts as its owner's, and is kept as a
        change of the caller's. Raises LimitError."""
        self.add(self.gate.tenant(self.gate.names.owner(full)), full, uri, seconds)
        self.gate.changed(who, "Adapters/Add", f"name={full} by --resolve")

    @contextmanager
    def updating(self, who: Identity, full: str) -> Iterator[CheckReplaced]:
        """While an adapter's content is replaced; what it yields raises LimitError where that would be too much: what
        still drains counts, but for the version that is replaced now. Raises LimitError."""
        if not who.tenant:
            yield lambda served, new: None
            return
        tenant = self.gate.tenant(who.tenant)
        self.gate.limits.check_rate(tenant)
        with self.gate.limits.adding(tenant, full):
            yield lambda served, new: limits.check_bytes(tenant, self._has(tenant.name)[1] - served.nbytes + new.nbytes)

    def _has(self, tenant: str) -> tuple[set[str], int]:
        """The names of a tenant's adapters, and how many bytes they have."""
        own = [one for one in self._adapters.catalog.records() if self.gate.names.owner(one.name) == tenant]
        return {one.name for one in own}, sum(one.nbytes for one in own)

    def check_still_good(self, lease: ClientLease) -> None:
        """A token that was revoked while its client joined; raises LeaseError."""
        if not self.gate.is_good(lease.tenant, lease.token):
            self.controller.clients.end(lease.client, lease.epoch)
            raise LeaseError(f"client {lease.client}: its token was revoked; join with another")

    def forget(self, full: str, who: Identity) -> None:
        """An adapter is gone: the next of its name is shared with nobody."""
        if self.gate.store is not None and full in self.gate.names.shared:
            self.gate.store.share(full, "", True, who)
            self.gate.cache.refresh()

    def find(self, who: Identity, name: str) -> str:
        """The full name of an adapter; raises UnknownAdapterError."""
        scope = self.of(who)
        full = scope.find(name)
        with scope.asking([name], [full]):
            return self._adapters.listings.get(full).record.name

    def begin_with(self, start: str) -> bool:
        """Whether there are adapters whose full names do."""
        return bool(self._adapters.listings.after((start, 0), 1, lambda name: name.startswith(start)))


class Scope:
    """Of one call."""

    def __init__(self, scopes: Scopes, who: Identity) -> None:
        self.who, self.gate, self.tenant = who, scopes.gate, scopes.gate.tenant(who.tenant)
        self._scopes, self._adapters, self._names = scopes, scopes.controller.adapters, scopes.gate.names

    def sees(self, full: str) -> bool:
        """Whether it may know of an adapter."""
        return self.who.sees_all or self._names.sees(self.who.tenant, full)

    def owns(self, full: str) -> bool:
        """Whether it may change an adapter."""
        return self.who.is_operator or self._names.owner(full) == self.who.tenant

    def own(self, name: str) -> str:
        """The full name of a new adapter."""
        return self._names.own(self.who.tenant, name)

    def find(self, name: str) -> str:
        """The full name that it means, of one that it sees; there may be none. Raises UnknownAdapterError."""
        if self.who.sees_all:
            return name
        meant = self._names.meant(self.who.tenant, name)
        if not meant:
            raise self._unknown(name)
        return next(iter(self._adapters.listings.known(meant)), meant[0])

    def bring(self, full: Iterable[str]) -> None:
        """Have names that nobody registered brought in, where there is a --resolve. Raises ServerBusyError meanwhile,
        UnknownAdapterError or LimitError where one did not come."""
        if (resolver := self._scopes.controller.resolver) is not None:
            for name in self._adapters.listings.missing(full):
                resolver.ask(name, partial(self._scopes.bring, self.who))

    @contextmanager
    def asking(self, names: Sequence[str], full: Sequence[str]) -> Iterator[None]:
        """Where one of these turns out not to be there, the caller is told of those alone that it sees."""
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
        """The full name of one that it may change. Raises UnknownAdapterError, and PermissionDeniedError for one that
        is shared with it."""
        full = self.find(name)
        if self.owns(full):
            return full
        if not self._adapters.listings.known([full]):
            raise self._unknown(name)
        raise PermissionDeniedError(f"adapter {name!r}: is another's; expected one of {self.who.tenant}")

    def check_acquire(self, full: Sequence[str]) -> CheckInUse | None:
        """Raises LimitError, now or when it is called; None where all that there is may be in use."""
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
        """Adapters that nobody can ask an engine for, since its base model has their names."""
        return self._adapters.listings.listed(
            full for name in served_names for full in self._names.meant(self.who.tenant, name)
        )

    def held_before(self, handles: Iterable[int]) -> list[int]:
        """Of these, what it may hold; an engine of the operator's holds for others, too."""
        if self.who.is_operator:
            return list(handles)
        names = ((handle, name_of(self._adapters.catalog, handle)) for handle in handles)
        return [handle for handle, name in names if name is not None and self.sees(name)]

    def check_lease(self, lease: ClientLease | None) -> None:
        """A lease is for who joined with it. Raises LeaseError."""
        if lease is not None and (lease.tenant, lease.token) != (self.who.tenant, self.who.token):
            raise LeaseError(f"client {lease.client}: its lease was made with another token; join with this one")

    # -- answers, without what is not the caller's

    def cut(self, adapter: pb.Adapter) -> pb.Adapter:
        """Where the server keeps its files, and who else uses it."""
        if not self.who.is_operator:
            adapter.ClearField("uri")
            if not self.owns(adapter.name):
                adapter.ClearField("holders")
                adapter.ClearField("warnings")
                adapter.ClearField("error")
        return adapter

    def cut_page(self, page: pb.ListAdaptersReply) -> pb.ListAdaptersReply:
        """Of all on it."""
        for adapter in page.adapters:
            self.cut(adapter)
        if not self.who.is_operator:
            for refusal in page.refused:
                refusal.ClearField("uri")
        return page

    def cut_status(self, status: pb.StatusReply) -> pb.StatusReply:
        """To a tenant, and an engine: whether it serves, and what it serves."""
        if self.who.sees_all:
            return status
        kept = pb.StatusReply(model=status.model, layout=status.layout, ready=status.ready, run=status.run)
        kept.reason = "" if status.ready else "not ready"
        for shard in status.shards:
            kept.shards.add(shard=shard.shard, stage=shard.stage, ep_rank=shard.ep_rank, state=shard.state)
        return kept
