"""The session of a client that has joined: links to the shards, and handles for names.

Implementations: gRPC to a running server (client_connector.remote), and shards inside the own
process (lora_server.demo.inproc).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from client_connector.moves import Move, MoveSlot
from client_connector.twins import TwinLinks
from lora_server.transport.base import Link
from lora_server.wire.terms import Held, Proof, Terms


class Session(ABC):
    """One joined client. Each of `links` is used by one thread at a time; the rest is thread-safe."""

    terms: Terms
    links: Sequence[Link]
    twins: TwinLinks | None = None  # where shards have twins: what connects lost links again
    moves: MoveSlot

    def adopt(self, move: Move) -> None:
        """Push steps to the shards of another placement from now on. For the thread that starts them."""
        left = Move(self.terms, self.links, self.twins)
        self.terms, self.links, self.twins = move
        left.drop()

    @abstractmethod
    def acquire(self, names: Sequence[str], deadline: float = 0.0, loaded: bool = False) -> list[Held]:
        """Acquire adapters, in the order of `names`; without capacity wait until `deadline` (time.monotonic()).

        `loaded`: wait until their weights are loaded, too. Raises UnknownAdapterError, LeaseError, AdmissionError,
        AdapterNotLoadedError.
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
        """Proof of this lease. Another session of the engine borrows with it what is held here; keep it secret."""

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
    """Something to join; `address` is for people."""

    address: str

    def join(self, seconds: float) -> Session:
        """Join; raises ServerUnavailableError, or why a shard could not be reached, at the deadline."""
        ...
