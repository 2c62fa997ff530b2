"""The session of a client that has joined: links to the shards, and handles for names.

Implementations: gRPC to a running server (client_connector.remote), and shards inside the own
process (lora_server.demo.inproc).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from lora_server.transport.base import Link
from lora_server.wire.slot import Wire

MAX_PREFETCHED = 256  # adapters that one client may announce at a time


class Proof(NamedTuple):
    """A client's credentials, which sign every call."""

    client: int
    epoch: int
    key: bytes


@dataclass(frozen=True)
class Terms:
    """The agreement of client and server. `max_step_rows` bounds the entries of one message."""

    client: int
    epoch: int
    spec: ModelSpec
    layout: Layout
    coordination: str
    max_step_rows: int
    server: str = ""  # the run of the server that granted the lease: handles mean nothing to another
    hidden_adapters: tuple[str, ...] = ()  # adapters that the client cannot serve: its base model has their names
    num_adapters: int = 0  # of the server when this was agreed
    wire: Wire = "exact"

    @property
    def placement(self) -> Placement:
        """Return the placement: the owner of each site and expert."""
        return Placement(self.spec, self.layout)


@dataclass(frozen=True)
class Held:
    """An adapter that the session holds; it is not removed before it is released."""

    name: str
    handle: int
    sites: frozenset[Site]
    version: str = ""
    invocation: Invocation | None = None


class Session(ABC):
    """One joined client. `links[shard]` is used by one thread at a time; the rest is thread-safe."""

    terms: Terms
    links: Sequence[Link]

    @abstractmethod
    def acquire(self, names: Sequence[str], deadline: float = 0.0) -> list[Held]:
        """Acquire adapters, in the order of `names`; without capacity wait until `deadline` (time.monotonic()).

        Raises UnknownAdapterError, LeaseError, AdmissionError.
        """

    @abstractmethod
    def release(self, handles: Sequence[int]) -> None:
        """Release handles, once per acquisition."""

    @abstractmethod
    def prefetch(self, expected: Mapping[int, float]) -> None:
        """Announce the handles that coming steps need, and in how many seconds; never blocks, never raises.

        An announcement replaces the one before.
        """

    @property
    @abstractmethod
    def proof(self) -> Proof:
        """Return the proof of this lease, a secret, by which another session of the engine may borrow its adapters."""

    @abstractmethod
    def borrow(self, holder: Proof) -> None:
        """Allow steps of this session to name what another session of the engine holds; raises LeaseError."""

    @abstractmethod
    def check(self) -> None:
        """Raise LeaseError once the lease is known to be gone."""

    @abstractmethod
    def leave(self) -> None:
        """Give the lease back; idempotent."""


class Server(Protocol):
    """A server that a client can join; `address` is for messages to people."""

    address: str

    def join(self, seconds: float) -> Session:
        """Join the server and return the session. Raises ServerUnavailableError at the deadline, or the error of a
        shard that cannot be reached."""
        ...
