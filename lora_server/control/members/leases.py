"""Leases of the clients that have joined. A client that is silent for too long loses its lease."""

from __future__ import annotations

import hmac
import random
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lora_server.clock import SYSTEM, Clock
from lora_server.errors import LeaseError, LimitError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.proofs import Counts, is_signed
from lora_server.wire.terms import Proof


class EngineTraits(NamedTuple):
    """Traits of an engine: what it said when it joined, and what its token says."""

    served_names: tuple[str, ...] = ()  # of its base model
    tenant: str = ""  # empty: the operator
    token: str = ""  # the id of what it joined with
    slo_class: str = ""
    merged: str = ""  # the adapter version in its base weights

    @property
    def credentials(self) -> tuple[str, str]:
        """Return the tenant and the token of the engine."""
        return self.tenant, self.token

    @classmethod
    def of(cls, grant: pb.Grant) -> EngineTraits:
        """Return those of a client of an earlier controller."""
        return cls(tuple(grant.served_names), grant.tenant, grant.token, grant.slo_class, grant.merged)


NO_TRAITS = EngineTraits()
HEARTBEATS = 250  # a second, of all clients together, that a controller asks for at most
UNHEARD = -1


@dataclass
class ClientLease:
    """One client's right to push; the key of `proof`, which it alone was told, proves it."""

    proof: Proof
    instance: str
    expires: float
    engine: EngineTraits = NO_TRAITS
    place: pb.Place | None = None  # in NVSHMEM's world, as it was when it joined
    grant: pb.Grant | None = None  # as shards were sent it
    generation: int = 0  # of the placement that its steps go by; 0: it pushes none, below: it has not said so yet
    replica: int = -1  # that its steps prefer; -1: it pushes none, or joined an earlier controller
    holder: int = 0  # the client whose holds its steps use, too; 0: it has not said so to this controller
    calls: Counts = field(default_factory=Counts)

    @property
    def client(self) -> int:
        """Return the client's id."""
        return self.proof.client

    @property
    def epoch(self) -> int:
        """Return the lease's epoch."""
        return self.proof.epoch

    def is_behind(self, generation: int) -> bool:
        """Return whether the client's steps go by an earlier placement, or may do."""
        return bool(self.generation) and self.generation < generation

    def granted(self, weight: float, step_us: int, generation: int) -> pb.Grant:
        """Return what shards are sent of it."""
        fields = self.proof._asdict() | self.engine._asdict()
        return pb.Grant(instance=self.instance, weight=weight, step_us=step_us, generation=generation, **fields)


class Leases:
    """The leases, by client. Thread-safe. One controller uses no client id twice; epochs start anywhere."""

    def __init__(self, seconds: float = 10.0, clock: Clock = SYSTEM, most_per_token: int = 8192) -> None:
        """`most_per_token`: clients that one token may have at a time; without tokens, all callers together."""
        self.seconds, self._clock, self._most_per_token = seconds, clock, most_per_token
        self._leases: dict[int, ClientLease] = {}
        self._next_client = 1
        self._epoch = random.SystemRandom().randrange(1, 0xFFFF)
        self._lock = threading.Lock()

    def grant(self, instance: str, engine: EngineTraits = NO_TRAITS, replicas: int = 0) -> ClientLease:
        """Grant a lease to a new client. If its steps may go to several replicas, they prefer the one that the fewest
        others prefer. Raises LimitError."""
        with self._lock:
            leases = self._leases.values()
            clients = sum(one.engine.credentials == engine.credentials for one in leases)
            if clients >= self._most_per_token:
                raise LimitError(
                    f"token {engine.token or 'none'}: got one client more than {clients}, expected at most "
                    f"{self._most_per_token} per token; stop engines, or start the server with a larger "
                    "--clients-per-token"
                )
            client, self._next_client = self._next_client, self._next_client + 1
            self._epoch = self._epoch % 0xFFFF + 1
            proof = Proof(client, self._epoch, secrets.token_bytes(32))
            lease = ClientLease(proof, instance, self._horizon(), engine)
            lease.replica = min(range(replicas), key=[one.replica for one in leases].count, default=-1)
            self._leases[client] = lease
            return lease

    def adopt(self, grants: Iterable[pb.Grant], last_client: int) -> list[pb.Grant]:
        """Take over clients of an earlier controller (`last_client`: its newest); return the grants of those that were
        not known yet."""
        adopted = []
        with self._lock:
            self._next_client = max(self._next_client, last_client + 1)
            for grant in grants:
                self._next_client = max(self._next_client, grant.client + 1)
                if grant.client not in self._leases:
                    proof = Proof(grant.client, grant.epoch, grant.key)
                    lease = ClientLease(proof, grant.instance, self._horizon())
                    lease.engine, lease.grant, lease.generation = EngineTraits.of(grant), grant, UNHEARD
                    self._leases[grant.client] = lease
                    adopted.append(grant)
        return adopted

    def merged_in(self, version: str) -> set[int]:
        """Return the clients that have an adapter version in their base weights."""
        with self._lock:
            return {lease.client for lease in self._leases.values() if lease.engine.merged == version}

    def serving(self, name: str, tenant: str = "") -> str | None:
        """Return the instance of a client with a base model of this name, of this tenant or the operator; None if there
        is none."""
        with self._lock:
            serving = (lease for lease in self._leases.values() if name in lease.engine.served_names)
            return next((lease.instance for lease in serving if lease.engine.tenant in ("", tenant)), None)

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
        good = lease is not None and is_signed(request, lease.proof.key) and lease.calls.take(told.count)
        return lease.proof if lease is not None and good else Proof(told.client, told.epoch, b"")

    def proven(self, proof: Proof) -> ClientLease | None:
        """Return the lease of a valid proof, else None."""
        lease = self.find(proof.client, proof.epoch)
        return lease if lease is not None and hmac.compare_digest(lease.proof.key, proof.key) else None

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


def heartbeat_pause(clients: int, lease_seconds: float) -> float:
    """Return the seconds that a client lets pass between two heartbeats, at least: the more clients, the longer, up to
    a fifth of the lease."""
    return min(lease_seconds / 5, clients / HEARTBEATS)
