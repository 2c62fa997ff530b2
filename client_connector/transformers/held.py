"""The adapters of one `lora.adapters(...)` block: held while it runs, in whichever session is current."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from client_connector.client import Client
from client_connector.merged import MergedHold
from client_connector.serving.request_state import RequestEvent, RequestState
from client_connector.session import Session
from lora_server.errors import LeaseError
from lora_server.wire.terms import Held


class BlockAdapters:
    """`names`: one per sequence, None for the base model. One thread; every name is a request of its own.

    `loaded`: they are held once their weights are loaded. `merged`: the adapter in the base weights; a block of it
    alone asks the server only which version is current, and goes on without an answer.
    """

    def __init__(
        self, client: Client, names: Sequence[str | None], loaded: bool = False, merged: MergedHold | None = None
    ) -> None:
        self._client, self.names, self._loaded = client, tuple(names), loaded
        is_merged = merged is not None and set(names) == {merged.record.name} and merged.is_current()
        self._in_weights = merged.in_weights if merged is not None and is_merged else None
        self._states = {name: RequestState() for name in sorted({name for name in names if name is not None})}
        self._session: Session | None = None  # in which they are held

    def hold(self) -> Mapping[str, Held]:
        """Hold every adapter in the current session, which may be a new one; return them by name.

        Raises UnknownAdapterError, AdmissionError, ServerUnavailableError.
        """
        if self._in_weights is not None:
            return {self._in_weights.name: self._in_weights}
        deadline = self._client.deadline()
        self._client.recover(deadline)
        if self._client.session is not self._session:
            try:
                held = self._acquire(deadline)
            except LeaseError:  # it expired since: once more under a new one
                self._client.recover(deadline)
                held = self._acquire(deadline)
            for one in held:
                self._states[one.name] = self._states[one.name].after(RequestEvent.GRANTED, held=one).state
            self._session = self._client.session
        return {name: state.held for name, state in self._states.items() if state.held is not None}

    def _acquire(self, deadline: float) -> Sequence[Held]:
        for event in (RequestEvent.LEASE_LOST, RequestEvent.RESUMED):
            self._states = {name: state.after(event).state for name, state in self._states.items()}
        return self._client.acquire(list(self._states), deadline, self._loaded) if self._states else []

    def release(self) -> None:
        """Give the adapters back, unless their session is gone."""
        ended = [state.after(RequestEvent.FINISHED).released for state in self._states.values()]
        if self._session is self._client.session:
            self._client.release([held for held in ended if held is not None])
