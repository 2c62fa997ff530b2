"""One session of the scheduler's, and requests that ask in it for their adapters: joined anew when it is lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from client_connector.alora import invocation_start
from client_connector.directory import Directory
from client_connector.remote import Queued, RemoteServer, RemoteSession
from client_connector.retry import while_away
from client_connector.serving.lookahead import Lookahead
from client_connector.serving.plan import PASSING, Failure
from client_connector.serving.rejoin import Rejoin
from client_connector.serving.settings import BASE_MODEL, Settings
from client_connector.serving.waiting import Use, Waiting
from lora_server.errors import AdapterLoadError, ConfigError, LeaseError, LoraServerError, ServerUnavailableError
from lora_server.transport.session import Held, Session

MOMENT = 1.0  # seconds in which a server answers whether a lease is good
log = structlog.get_logger()


class Asking:
    """Thread-safe. `tokenize` makes tokens of a legacy invocation string."""

    def __init__(self, settings: Settings, tokenize: Callable[[str], Sequence[int]]) -> None:
        """Joins; raises ServerUnavailableError, ConfigError if a base model's name hides an adapter."""
        self._settings, self._tokenize = settings, tokenize
        names = settings.served_names
        self._server = RemoteServer(
            settings.address,
            settings.transport,
            links=False,
            served_names=names,
            wire=settings.wire,
            timings=settings.timings,
        )
        self._lock = threading.Lock()  # state
        self._calls = threading.RLock()  # the session, while it is talked to; taken before _lock
        self._session: RemoteSession = self._server.join(settings.timeout_seconds)
        if self._session.terms.hidden_adapters:
            self._session.leave()
            raise ConfigError(self._hidden())
        self._uses: dict[str, Use] = {}
        self._waiting = Waiting(self._ask_again, lambda: self._directory.ready(), self._give_up, settings.timings)
        self._known: set[int] = set()  # handles that workers heard of
        self._suspect = False
        self._rejoin = Rejoin(self._regain, "scheduler")
        self._lookahead = Lookahead(lambda expected: self._session.prefetch(expected))
        self._directory = Directory(settings.address, timings=settings.timings)
        self._releases: queue.SimpleQueue[tuple[Session, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._release_loop, name="lora-release", daemon=True).start()

    def _hidden(self) -> str:
        names, hidden = list(self._settings.served_names), list(self._session.terms.hidden_adapters)
        return (
            f"served names {names}: {hidden} are adapters of the server {self._settings.address} too, "
            "and requests for them would be answered by the base model; "
            "serve the base model under another name (vLLM: --served-model-name), or remove them"
        )

    # -- a request asks

    def _ask(self, use: Use, again: bool = False) -> bool:
        """Acquire: whether that was answered. Otherwise it waits, for a place or for the server."""
        if not again:
            use.session = None
        with self._calls:
            try:
                answer = self._answer(use)
            except (LeaseError, ServerUnavailableError):
                if not again:
                    self._await_server(use)
                use.until = use.until or time.monotonic() + self._settings.timeout_seconds
                return False
            use.until = 0.0
            if not isinstance(answer, Queued):
                (held,) = answer
                self._meet(use, held)
                self._take(use, held, again)
                return True
            (held,) = answer.held
            self._meet(use, held)
            use.queued = use.failure is None and (use.queued or not again)
            self._waiting.add(use)
            return False

    def _answer(self, use: Use) -> list[Held] | Queued:
        try:
            if not self._session_lost():
                return self._ask_once(use)
        except (LeaseError, ServerUnavailableError):  # it restarted since, or is away
            pass
        if not self._rejoin.wait(0.0):
            raise self._away()
        return self._ask_once(use)

    def _ask_once(self, use: Use) -> list[Held] | Queued:
        if use.session is not self._session:
            use.session, use.ticket = self._session, self._session.ticket()
        with structlog.contextvars.bound_contextvars(request=use.request):
            return self._session.ask(use.ticket, [use.name], on_behalf_of=use.tenant)

    def _ask_again(self, use: Use) -> bool:
        """In the thread that waits: whether its ticket is answered."""
        try:
            return use.queued and self._ask(use, again=True)
        except LoraServerError as error:
            self._let_go(use)
            self._fail(use, error)
            return True

    def _await_server(self, use: Use) -> None:
        """Its ticket, if it had one, is none any more."""
        use.session, use.queued = None, True
        use.until = time.monotonic() + self._settings.timeout_seconds
        self._waiting.add(use)

    def _give_up(self, use: Use, is_up: bool) -> None:
        """In the thread that waits: a request waits so long for a server that is away, and an outage has so much time
        for all."""
        outage, seconds = self._rejoin.away_seconds, self._settings.timeout_seconds
        if time.monotonic() < use.until and (is_up or outage < seconds):
            return
        self._let_go(use)
        use.failure = use.void
        if use.failure is None:
            self._fail(use, self._away())

    def _away(self) -> ServerUnavailableError:
        reason = "" if self._rejoin.error is None else f" ({self._rejoin.error})"
        return ServerUnavailableError(
            f"server {self._settings.address}: went away and is being joined anew{reason}; send the request again"
        )

    def _meet(self, use: Use, held: Held) -> None:
        """What a request waited for must be what it asked for; an activated LoRA says where it begins."""
        if not use.version:
            use.version = held.version
            self._activate(use, held)
        elif held.version != use.version:
            use.failure = Failure.of(
                AdapterLoadError(
                    f"adapter {use.name!r}: version {use.version[:12]} was replaced by {held.version[:12]} "
                    "while the request waited; send it again"
                )
            )

    def _activate(self, use: Use, held: Held) -> None:
        """One that is not invoked is let go, and the request flagged."""
        if held.invocation is None:
            return
        try:
            tokens = held.invocation.tokens or tuple(self._tokenize(held.invocation.text))
        except ConfigError as error:
            self._fail(use, error)
            return
        start = invocation_start(use.prompt or (), tokens) if tokens else None
        if start is not None:
            use.start = start
            return
        use.falls_back = True
        use.failure = Failure("not_invoked", f"adapter {use.name!r}: the prompt lacks its invocation {list(tokens)}")

    def _take(self, use: Use, held: Held, again: bool) -> None:
        with self._lock:
            # or its request ended, or failed, while it was asked for
            wanted = use.failure is None and (use.queued or not again)
            use.held, use.queued = held if wanted else None, False
        if wanted and again:
            self._lookahead.arrived(held.handle)
        elif not wanted:
            self._releases.put((self._session, held.handle))

    def _let_go(self, use: Use) -> None:
        """One that is queued is cancelled by the thread that waits."""
        with self._lock:
            held, use.held, use.queued = use.held, None, False
        if held is not None:
            self._releases.put((self._session, held.handle))

    def _fail(self, use: Use, error: LoraServerError) -> None:
        use.failure = Failure.of(error)
        use.falls_back = isinstance(error, PASSING) and self._settings.on_failure == BASE_MODEL

    # -- the session

    def _session_lost(self) -> bool:
        try:
            self._session.check()
        except LeaseError:
            return True
        return False

    def _check(self) -> None:
        """A step failed, or the lease is known to be gone. In the engine's loop, so without waiting."""
        with self._calls:
            try:
                self._session.acquire([], time.monotonic() + MOMENT)
                self._suspect = False
            except (LeaseError, ServerUnavailableError):
                self._rejoin.wait(0.0)

    def _regain(self) -> None:
        """The server is there: under the old lease where it is still good, else under a new one."""
        try:
            self._session.check()
            while_away(self._settings.timeout_seconds)(self._session.acquire, [])
        except LeaseError:
            self._rejoined()
        else:
            self._suspect = False

    def _rejoined(self) -> None:
        """A new lease; what was held under the old one is acquired again when it is next scheduled."""
        fresh = self._server.join(self._settings.timeout_seconds)
        with self._lock:
            old, self._session, self._suspect, self._known = self._session, fresh, False, set()
            for use in self._uses.values():
                use.held = None
        old.leave()
        if fresh.terms.hidden_adapters:  # the base model's requests are served all the same
            log.error("adapters are hidden", error=self._hidden())

    def _release_loop(self) -> None:
        while (release := self._releases.get()) is not None:
            session, handle = release
            try:
                session.release([handle])
            except LoraServerError as error:
                log.warning("adapter not released", handle=handle, error=str(error))

    def close(self) -> None:
        """Leave the server; idempotent."""
        self._rejoin.close()
        self._directory.close()
        self._waiting.close()
        self._releases.put(None)
        with self._calls:
            self._session.leave()
