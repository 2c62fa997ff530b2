"""Leases of the clients that have joined. A client that is silent for too long loses its lease."""

from __future__ import annotations

import hmac
import random
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lora_server.clock import SYSTEM, Clock
from lora_server.errors import LeaseError, LimitError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.proofs import Counts, is_signed
from lora_server.wire.terms import Proof


@dataclass
class ClientLease:
    """One client's right to push; `key`, which it alone was told, proves it."""

    client: int
    epoch: int
    key: bytes
    instance: str
    expires: float
    served_names: tuple[str, ...] = ()  # the engine's names of its base model
    tenant: str = ""  # empty: the operator's client
    token: str = ""  # the id of what it joined with
    slo_class: str = ""
    merged: str = ""  # the adapter version in its base weights
    place: pb.Place | None = None  # in NVSHMEM's world, as it was when it joined
    grant: pb.Grant | None = None  # as shards were sent it
    replica: int = -1  # that its steps prefer; -1: it pushes none, or joined an earlier controller
    calls: Counts = field(default_factory=Counts)

    @property
    def proof(self) -> Proof:
        """Return the proof that the client sends with its calls."""
        return Proof(self.client, self.epoch, self.key)


class Leases:
    """The leases, by client. Thread-safe. One controller uses no client id twice; epochs start anywhere."""

    def __init__(self, seconds: float = 10.0, clock: Clock = SYSTEM, most_per_token: int = 8192) -> None:
        """`most_per_token`: clients that one token may have at a time; without tokens, all callers together."""
        self.seconds, self._clock, self._most_per_token = seconds, clock, most_per_token
        self._leases: dict[int, ClientLease] = {}
        self._next_client = 1
        self._epoch = random.SystemRandom().randrange(1, 0xFFFF)
        self._lock = threading.Lock()

    def grant(
        self,
        instance: str,
        served_names: Iterable[str] = (),
        tenant: str = "",
        token: str = "",
        slo_class: str = "",
        merged: str = "",
    ) -> ClientLease:
        """Grant a lease to a new client. Raises LimitError."""
        with self._lock:
            clients = sum((one.tenant, one.token) == (tenant, token) for one in self._leases.values())
            if clients >= self._most_per_token:
                raise LimitError(
                    f"token {token or 'none'}: got one client more than {clients}, expected at most "
                    f"{self._most_per_token} per token; stop engines, or start the server with a larger "
                    "--clients-per-token"
                )
            client, self._next_client = self._next_client, self._next_client + 1
            self._epoch = self._epoch % 0xFFFF + 1
            key = secrets.token_bytes(32)
            whose = tuple(served_names), tenant, token, slo_class, merged
            lease = ClientLease(client, self._epoch, key, instance, self._horizon(), *whose)
            self._leases[client] = lease
            return lease

    def adopt(self, grant: pb.Grant) -> bool:
        """Take over a client of an earlier controller; return False if it is known already."""
        client, names = grant.client, tuple(grant.served_names)
        with self._lock:
            self._next_client = max(self._next_client, client + 1)
            if client in self._leases:
                return False
            whose = grant.tenant, grant.token, grant.slo_class, grant.merged
            lease = ClientLease(client, grant.epoch, grant.key, grant.instance, self._horizon(), names, *whose)
            lease.grant = grant
            self._leases[client] = lease
            return True

    def prefer(self, lease: ClientLease, replicas: int) -> None:
        """Let the steps of a client prefer the replica that the fewest others prefer."""
        with self._lock:
            taken = [one.replica for one in self._leases.values()]
            lease.replica = min(range(replicas), key=taken.count)

    def merged_in(self, version: str) -> set[int]:
        """Return the clients whose base weights contain an adapter version."""
        with self._lock:
            return {lease.client for lease in self._leases.values() if lease.merged == version}

    def serving(self, name: str, tenant: str = "") -> str | None:
        """Return the instance of a client with a base model of this name, of this tenant or the operator; None if there
        is none."""
        with self._lock:
            serving = (lease for lease in self._leases.values() if name in lease.served_names)
            return next((lease.instance for lease in serving if lease.tenant in ("", tenant)), None)

    def reserve(self, client: int) -> None:
        """Never use client ids up to this one: an earlier controller used them."""
        with self._lock:
            self._next_client = max(self._next_client, client + 1)

    def find(self, client: int, epoch: int) -> ClientLease | None:
        """Return the lease of this client and epoch, None if it is gone."""
        with self._lock:
            lease = self._leases.get(client)
            return lease if lease is not None and lease.epoch == epoch else None

    def proof_of(self, request: Any) -> Proof:
        """Return the proof of the lease that signed a request; its key is empty if the signature is wrong or was used
        before."""
        told = request.proof
        lease = self.find(told.client, told.epoch)
        good = lease is not None and is_signed(request, lease.key) and lease.calls.take(told.count)
        return lease.proof if lease is not None and good else Proof(told.client, told.epoch, b"")

    def proven(self, proof: Proof) -> ClientLease | None:
        """Return the lease of a valid proof, else None."""
        lease = self.find(proof.client, proof.epoch)
        return lease if lease is not None and hmac.compare_digest(lease.key, proof.key) else None

    def renew(self, proof: Proof) -> int:
        """Extend a client's lease and return its id. Raises LeaseError if the lease is gone, or is another's."""
        lease = self.proven(proof)
        if lease is None:
            raise LeaseError(
                f"client {proof.client} epoch {proof.epoch}: its lease is gone (it left, it was silent for more than "
                f"{self.seconds:g} s, or the server restarted); join again"
            )
        lease.expires = self._horizon()
        return lease.client

    def end(self, client: int, epoch: int) -> bool:
        """End the lease of a client that left or died; return False if it had ended before."""
        with self._lock:
            lease = self._leases.get(client)
            if lease is None or lease.epoch != epoch:
                return False
            del self._leases[client]
            return True

    def excuse(self, seconds: float) -> None:
        """Extend all leases by a time in which the controller could not hear its clients."""
        with self._lock:
            for lease in self._leases.values():
                lease.expires += seconds

    def take_expired(self) -> list[ClientLease]:
        """End the expired leases and return them."""
        now = self._clock.now()
        with self._lock:
            expired = [lease for lease in self._leases.values() if lease.expires < now]
            for lease in expired:
                del self._leases[lease.client]
            return expired

    def silences(self) -> list[tuple[ClientLease, float]]:
        """Return every lease, sorted by client, and for how many seconds its client has been silent."""
        now = self._clock.now()
        with self._lock:
            leases = sorted(self._leases.values(), key=lambda lease: lease.client)
            return [(lease, max(0.0, now + self.seconds - lease.expires)) for lease in leases]

    def __len__(self) -> int:
        return len(self._leases)

    def _horizon(self) -> float:
        return self._clock.now() + self.seconds
