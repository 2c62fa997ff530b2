"""A cache of tokens and tenants, so that no call waits for the database."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from lora_server.access.audit import Audit
from lora_server.access.store import NOTHING, Store
from lora_server.errors import ServerUnavailableError

CLOSE_SECONDS = 5.0
log = structlog.get_logger()


class AccessCache:
    """A snapshot of the store, which a thread refreshes; all controllers of a database agree within two seconds.

    Thread-safe. `known` is the snapshot; `on_change` is called after it was replaced.
    """

    def __init__(self, store: Store | None, audit: Audit, seconds: float) -> None:
        """Start a thread that refreshes the snapshot and writes the audit log every `seconds`. Without a store there is
        no thread, and the snapshot is empty."""
        self._store, self._audit, self._seconds = store, audit, seconds
        self.on_change: Callable[[], object] = lambda: None
        self.known = store.load() if store is not None else NOTHING
        self._lock = threading.Lock()  # one refresh at a time
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access", daemon=True)
        if store is not None:
            self._thread.start()

    def refresh(self) -> None:
        """Read the changes from the database into a new snapshot; keep the old one if the database is unreachable."""
        assert self._store is not None
        with self._lock:
            try:
                known = self._store.load(self.known)
            except ServerUnavailableError as error:
                log.warning("cannot refresh tokens; keeping the cached set", reason=str(error))
                return
            if known is self.known:
                return
            self.known = known
        self.on_change()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self.refresh()
                self._audit.flush(seconds=0.0)
            except Exception:
                log.exception("refreshing tokens failed; trying again")

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
