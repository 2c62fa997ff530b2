"""What was changed, by whom, and what became of it; also what somebody tried who may not. In the database, and the log.

Whoever may do nothing can make us write: so of those tries only some are kept, and how many more there were.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import structlog
from sqlalchemy import Connection, delete, insert, select

from lora_server.access.identity import Identity
from lora_server.access.limits import Bucket
from lora_server.access.tables import audit
from lora_server.errors import LoraServerError, PermissionDeniedError, ServerUnavailableError, UnauthenticatedError
from lora_server.registry.database import Database

KEPT, REFUSED_KEPT = 100_000, 10_000  # entries: of changes, and of those who may not
REFUSED_RATE, REFUSED_AT_ONCE = 5.0, 50
WAITING = 1000  # entries that are not written yet
MAX_SUBJECT, MAX_REASON, MAX_PAGE = 300, 1000, 1000
REFUSALS = (UnauthenticatedError.code, PermissionDeniedError.code)
log = structlog.get_logger()


class Entry(NamedTuple):
    """One call."""

    serial: int
    at: float
    tenant: str
    role: str
    token: str
    call: str
    subject: str
    outcome: str
    reason: str


class Audit:
    """Thread-safe. Without a database it is in the log alone."""

    def __init__(
        self, database: Database | None, refused: Bucket | None = None, refused_kept: int = REFUSED_KEPT
    ) -> None:
        """`refused`: how many refusals are kept of a flood; `refused_kept`: of all."""
        self._database, self._refused_kept = database, refused_kept
        self._waiting: deque[dict[str, Any]] = deque(maxlen=WAITING)
        self._bucket, self._left_out = refused or Bucket(REFUSED_RATE, REFUSED_AT_ONCE), 0
        self._lock = threading.Lock()  # these
        self._writing = threading.Lock()

    def note(self, who: Identity | None, call: str, subject: str, error: LoraServerError | None = None) -> None:
        """It is written by the next `flush`; `who` is None for a stranger."""
        entry: dict[str, Any] = {
            "at": time.time(),
            "tenant": who.tenant if who else "",
            "role": str(who.role) if who else "stranger",
            "token": who.token if who else "",
            "call": call,
            "subject": subject[:MAX_SUBJECT],
            "outcome": error.code if error is not None else "ok",
            "reason": str(error)[:MAX_REASON] if error is not None else "",
        }
        with self._lock:
            if entry["outcome"] in REFUSALS:
                if not self._bucket.take():
                    self._left_out += 1
                    return
                if self._left_out:
                    entry["reason"] += f" ({self._left_out} more tries since the last entry)"
                    self._left_out = 0
            self._waiting.append(entry)
        log.info("audit", **{name: value for name, value in entry.items() if name != "at"})

    def flush(self) -> None:
        """Write what waits; what cannot be written now waits on."""
        if self._database is None:
            self._waiting.clear()
            return
        with self._writing:
            with self._lock:
                entries = list(self._waiting)
            if not entries:
                return
            try:
                self._database.write(lambda connection: _write(connection, entries, self._refused_kept))
            except ServerUnavailableError as error:
                log.warning("the audit log cannot be written now", entries=len(entries), reason=str(error))
                return
            with self._lock:
                for _ in entries:  # more may have come, and the oldest gone for them
                    if self._waiting and self._waiting[0] in entries:
                        self._waiting.popleft()

    def read(self, after: int, most: int, tenant: str | None) -> list[Entry]:
        """The newest of a tenant's, or of all; oldest first."""
        if self._database is None:
            return []
        asked = select(audit).where(audit.c.serial > after).order_by(audit.c.serial.desc())
        if tenant is not None:
            asked = asked.where(audit.c.tenant == tenant)
        asked = asked.limit(min(most or MAX_PAGE, MAX_PAGE))
        rows = self._database.read(lambda connection: connection.execute(asked).all())
        return [Entry(**row._mapping) for row in reversed(rows)]


def _write(connection: Connection, entries: list[dict[str, Any]], refused_kept: int) -> None:
    connection.execute(insert(audit), entries)
    refused = audit.c.outcome.in_(REFUSALS)
    for which, kept in ((refused, refused_kept), (~refused, KEPT)):
        first = select(audit.c.serial).where(which).order_by(audit.c.serial.desc()).offset(kept).limit(1)
        serial = connection.execute(first).scalar()
        if serial is not None:
            connection.execute(delete(audit).where(which, audit.c.serial <= serial))
