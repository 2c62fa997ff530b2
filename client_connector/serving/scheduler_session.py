"""The scheduler's lease on a server: a session without links, joined again when it is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import structlog

from client_connector.directory import AdapterDirectory
from client_connector.holds import Answer, LoadingAnswer, QueuedAnswer
from client_connector.merged import SchedulerHold
from client_connector.reconnect import Reconnector, while_away
from client_connector.remote import RemoteServer, RemoteSession
from client_connector.serving.poller import AdapterRequest, AdmissionTicket
from client_connector.serving.settings import Settings
from lora_server.errors import ConfigError, LeaseError, LoraServerError, ServerUnavailableError
from lora_server.merged import MergedRecord
from lora_server.wire.terms import Held

CHECK_SECONDS = 1.0  # for a server to say whether a lease is good
log = structlog.get_logger()


class SchedulerSession:
    """The session of an engine's scheduler. Thread-safe.

    `current` is replaced when the session was lost; a handle is valid only in the session that issued it.
    """

    def __init__(self, settings: Settings, record: MergedRecord | None = None) -> None:
        """Join, and hold what `record` says is merged into the weights. Raises ServerUnavailableError; ConfigError if a
        name of the base model hides an adapter; GeometryMismatchError or UnknownAdapterError if the server has another
        base model, or not the merged version."""
        self._settings = settings
        self._server = RemoteServer(
            settings.address,
            settings.transport,
            links=False,
            served_names=settings.served_names,
            wire=settings.wire,
            timings=settings.timings,
            slo_class=settings.slo_class,
            merged="" if record is None else record.version,
        )
        self._calls = threading.RLock()  # one call of `ask`, `check` or `close` at a time
        self.current: RemoteSession = self._server.join(settings.timeout_seconds)
        if self.current.terms.hidden_adapters:
            self.current.leave()
            raise ConfigError(_hidden(settings, self.current))
        self.merged = SchedulerHold(record, settings.timeout_seconds)
        self.waits = self._server.waits  # of requests, until the server has heard of them
        try:
            self.merged.renew(self.current)
        except BaseException:
            self.current.leave()
            raise
        self._must_revalidate = False  # a step failed: the lease may be gone
        self._reconnector = Reconnector(self._rejoin, "scheduler")
        self._directory = AdapterDirectory(settings.address, timings=settings.timings)

    def _merged_for(self, request: AdapterRequest) -> Held | None:
        """Return the answer to a request of the base model. Raises ServerUnavailableError for any request while the
        adapter in the weights is not held."""
        merged = self.merged.held_in(self.current)
        if self.merged.record is not None and merged is None:
            raise self.away_error()
        return merged if request.is_base else None

    # -- a request

    def ask(self, request: AdapterRequest) -> list[Held] | QueuedAnswer | LoadingAnswer:
        """Ask for a request's adapter under its ticket, or under a new one if it has none in this session.

        Raises LeaseError or ServerUnavailableError while the server is away, and the server's error about the adapter.
        """
        with self._calls:
            try:
                if not self._is_lost():
                    return self._ask_once(request)
            except (LeaseError, ServerUnavailableError):  # it restarted since, or is away
                pass
            if not self._reconnector.wait(0.0):
                raise self.away_error()
            return self._ask_once(request)

    def _ask_once(self, request: AdapterRequest) -> list[Held] | QueuedAnswer | LoadingAnswer:
        session, number = self._ticket(request)
        if (merged := self._merged_for(request)) is not None:
            return [merged]
        with structlog.contextvars.bound_contextvars(request=request.request_id):
            return session.ask(number, [request.name], on_behalf_of=request.tenant, pace=request.pace)

    def ask_soon(self, request: AdapterRequest) -> Answer:
        """Ask as `ask` does, but without waiting, for the answer or for a server that is away."""
        if self._is_lost():
            raise self.away_error()
        session, number = self._ticket(request)
        if (merged := self._merged_for(request)) is not None:
            answer: Answer = Future()
            answer.set_result([merged])
            return answer
        with structlog.contextvars.bound_contextvars(request=request.request_id):
            return session.ask_soon(number, [request.name], request.tenant, request.pace)

    def _ticket(self, request: AdapterRequest) -> AdmissionTicket:
        session = self.current
        if request.ticket is None or request.ticket.session is not session:
            request.ticket = AdmissionTicket(session, session.ticket())
        return request.ticket

    # -- the lease

    def revalidate(self) -> None:
        """Have the next `check` ask the server whether the lease is good."""
        self._must_revalidate = True

    def check(self) -> None:
        """Start joining again if the lease is gone. Called by the engine's loop: waits CHECK_SECONDS at most."""
        if not self._must_revalidate and not self._is_lost():
            return
        with self._calls:
            try:
                self.current.acquire([], time.monotonic() + CHECK_SECONDS)
                self._must_revalidate = False
            except (LeaseError, ServerUnavailableError):
                self.seek()

    def seek(self) -> None:
        """Start joining the server again, unless that runs."""
        with contextlib.suppress(LoraServerError):  # requests that ask get the reason
            self._reconnector.wait(0.0)

    def is_up(self) -> bool:
        """Return whether the server answers and all its shards are up."""
        return self._directory.ready()

    @property
    def away_seconds(self) -> float:
        """Seconds since the server was lost; 0 while it is there."""
        return self._reconnector.away_seconds

    def away_error(self) -> ServerUnavailableError:
        """Describe the outage to a request that cannot wait for its end."""
        reason = "" if self._reconnector.error is None else f" ({self._reconnector.error})"
        return ServerUnavailableError(
            f"server {self._settings.address}: went away and is being joined again{reason}; send the request again"
        )

    def _is_lost(self) -> bool:
        try:
            self.current.check()
        except LeaseError:
            return True
        return False

    def _rejoin(self) -> None:
        """Find the server again: under the old lease if that is still good, else under a new one."""
        try:
            self.current.check()
            while_away(self._settings.timeout_seconds)(self.current.acquire, [])
        except LeaseError:
            old, self.current = self.current, self._server.join(self._settings.timeout_seconds)
            old.leave()
            if self.current.terms.hidden_adapters:  # requests of the base model are served all the same
                log.error("adapters are hidden", error=_hidden(self._settings, self.current))
        self.merged.renew(self.current)
        self._must_revalidate = False

    def close(self) -> None:
        """Leave the server; idempotent."""
        self._reconnector.close()
        self._directory.close()
        with self._calls:
            self.current.leave()


def _hidden(settings: Settings, session: RemoteSession) -> str:
    names, hidden = list(settings.served_names), list(session.terms.hidden_adapters)
    return (
        f"served names {names}: {hidden} are adapters of the server {settings.address} too, "
        "and requests for them would be answered by the base model; "
        "serve the base model under another name (vLLM: --served-model-name), or remove them"
    )
