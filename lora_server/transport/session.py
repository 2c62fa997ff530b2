"""What a client has after joining: its links to the shards, and names turned into handles.

Implementations: gRPC to a running server (client_connector.remote), and shards inside the own
process (lora_server.daemon.inproc).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lora_server.placement import Layout, Placement
from lora_server.spec import Invocation, ModelSpec, Site
from lora_server.transport.base import Link
from lora_server.wire.slot import Wire

MAX_PREFETCHED = 256  # adapters that one client may announce at a time


class Proof(NamedTuple):
    """A client's right to speak for itself: what it sends along with every call."""

    client: int
    epoch: int
    key: bytes


@dataclass(frozen=True)
class Terms:
    """What client and server agreed on. `max_step_rows` bounds the entries of one message."""

    client: int
    epoch: int
    spec: ModelSpec
    layout: Layout
    coordination: str
    max_step_rows: int
    server: str = ""  # the run of the server that granted the lease: handles mean nothing to another
    hidden_adapters: tuple[str, ...] = ()  # have a name under which the client answers from its base model
    num_adapters: int = 0  # of the server when this was agreed
    wire: Wire = "exact"

    @property
    def placement(self) -> Placement:
        """Who owns what."""
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
        """Hold adapters, in the order of `names`; where there is no place, wait until `deadline` (time.monotonic()).

        Raises UnknownAdapterError, LeaseError, AdmissionError.
        """

    @abstractmethod
    def release(self, handles: Sequence[int]) -> None:
        """Let go, once per acquired handle."""

    @abstractmethod
    def prefetch(self, expected: Mapping[int, float]) -> None:
        """Say which handles coming steps need, and in how many seconds; never blocks, never raises.

        It takes the place of what was said before.
        """

    @property
    @abstractmethod
    def proof(self) -> Proof:
        """Whoever knows it may compute with what is held here (`borrow`): for the own engine alone."""

    @abstractmethod
    def borrow(self, holder: Proof) -> None:
        """Steps of this session may name what another session of the engine holds; raises LeaseError."""

    @abstractmethod
    def check(self) -> None:
        """Raises LeaseError once the lease is known to be gone."""

    @abstractmethod
    def leave(self) -> None:
        """Give everything back; idempotent."""


class Server(Protocol):
    """Something to join; `address` is for people."""

    address: str

    def join(self, seconds: float) -> Session:
        """A new session; raises ServerUnavailableError, or why a shard could not be reached, at the deadline."""
        ...
