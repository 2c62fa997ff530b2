"""Base weights that contain an adapter: what each row needs from the server then.

A row of the merged adapter needs nothing. Any other row, the base model's too, gets minus the merged adapter's delta.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from client_connector.client import Client
from client_connector.session import Session
from lora_server.errors import GeometryMismatchError, LeaseError, ServerUnavailableError, UnknownAdapterError
from lora_server.merged import MERGED, MergedRecord
from lora_server.wire.terms import Held, Terms

LOOK_SECONDS = 0.5  # for a server to say which version is current
Segments = tuple[tuple[Held, float], ...]


def row_segments(held: Held | None, merged: Held | None) -> Segments:
    """Return the segments of a row of adapter `held` (None: the base model) over weights that contain `merged`."""
    own = () if held is None else ((held, 1.0),)
    if merged is None or (held is not None and held.version == merged.version):
        return own if merged is None else ()
    return (*own, (merged, -1.0))


def check_merged(record: MergedRecord, terms: Terms) -> None:
    """Raise GeometryMismatchError if the weights were merged from another base model than the server's."""
    served = terms.spec
    if record.base_fingerprint != served.fingerprint():
        raise GeometryMismatchError(
            f"{MERGED}: {record.name} was merged into {record.base_model} ({record.base_fingerprint}), and the server "
            f"serves {served.name} ({served.fingerprint()}): merge again, or start the server with that base model"
        )
    if terms.base_weights not in ("", record.base_weights):
        raise GeometryMismatchError(
            f"{MERGED}: {record.name} was merged into weights {record.base_weights}, and the server's base model "
            f"{served.name} has the same sizes and weights {terms.base_weights}: merge again, or start the server "
            "with the --base-model that was merged into"
        )


def hold_version(
    record: MergedRecord, acquire: Callable[[Sequence[str], float], Sequence[Held]], deadline: float
) -> Held:
    """Acquire the version in the weights, whatever its name means by now. Raises UnknownAdapterError if the server
    never had it, or has forgotten it."""
    try:
        (held,) = acquire([f"{record.name}@{record.version}"], deadline)
    except UnknownAdapterError as error:
        raise UnknownAdapterError(
            f"{MERGED}: the weights contain {record.name} {record.version[:12]}: {error}; merge the version that "
            "serves and start the engine on it"
        ) from None
    return held


class SchedulerHold:
    """Holds the merged version, if there is one, in one session of an engine's scheduler after the other."""

    def __init__(self, record: MergedRecord | None, seconds: float) -> None:
        """`seconds`: the longest that `renew` waits."""
        self.record, self._seconds = record, seconds
        self._held: tuple[Session, Held] | None = None

    def renew(self, session: Session) -> None:
        """Hold it in this session, for as long as that lives. Raises GeometryMismatchError, UnknownAdapterError,
        ServerUnavailableError."""
        if self.record is not None and self.held_in(session) is None:
            check_merged(self.record, session.terms)
            deadline = time.monotonic() + self._seconds
            self._held = session, hold_version(self.record, session.acquire, deadline)

    def held_in(self, session: Session) -> Held | None:
        """Return the adapter in the weights, as it is held in a session; None without one, or while it is not held."""
        return self._held[1] if self._held is not None and self._held[0] is session else None


class MergedHold:
    """Holds the merged version in a client's current session, as long as the client lives. One thread."""

    def __init__(self, client: Client, record: MergedRecord) -> None:
        """Acquire it. Raises GeometryMismatchError, UnknownAdapterError, ServerUnavailableError."""
        self._client, self.record = client, record
        self.in_weights = Held(record.name, 0, frozenset(), record.version)  # stands for rows without a step
        self._session: Session | None = None
        self._was_current = True
        check_merged(record, client.terms)
        self.held(client.deadline())

    def held(self, deadline: float) -> Held:
        """Return it as it is held in the current session, which may be a new one."""
        if self._session is not self._client.session:
            self._held = hold_version(self.record, self._client.acquire, deadline)
            self._session = self._client.session
        return self._held

    def is_current(self) -> bool:
        """Return whether the adapter's name means the version in the weights; while the server is away, whether it did.

        Waits LOOK_SECONDS at most.
        """
        if self._client.lost() is None:
            try:
                held = self._client.session.acquire([self.record.name], time.monotonic() + LOOK_SECONDS)
                self._client.release(held)
                self._was_current = held[0].version == self.record.version
            except (LeaseError, ServerUnavailableError):
                pass
        return self._was_current
