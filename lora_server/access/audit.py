"""The audit log: every change, its caller and its outcome, and calls that were refused. In the database and the log.

A caller without rights can cause entries too: of refused calls some are kept, with the number of the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import structlog
from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.exc import DataError, SQLAlchemyError

from lora_server.access.identity import Identity
from lora_server.access.limits import Bucket
from lora_server.access.tables import audit
from lora_server.errors import LoraServerError, PermissionDeniedError, ServerUnavailableError, UnauthenticatedError
from lora_server.logs import Repeats, refusal_written
from lora_server.registry.database import Database
from lora_server.timings import Timings

KEPT, REFUSED_KEPT = 100_000, 10_000  # entries: of changes, and of refused calls
REFUSED_RATE, REFUSED_AT_ONCE = 5.0, 50
WAITING = 1000  # entries that are not written yet
MAX_SUBJECT, MAX_REASON, MAX_PAGE = 300, 1000, 1000
REFUSALS = (UnauthenticatedError.code, PermissionDeniedError.code)
UNWRITABLE = (DataError, ValueError)  # a value that no database, or not this one, can hold; UnicodeEncodeError is one
log = structlog.get_logger()


class AuditEntry(NamedTuple):
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
        self._writing = threading.Lock()  # held by one flush, with the next
        self._complain = Repeats(log.warning)

    def note(self, who: Identity | None, call: str, subject: str, error: LoraServerError | None = None) -> None:
        """Queue an entry for the next `flush`. The identity is None for an unauthenticated caller."""
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
        if error is not None:
            refusal_written()

    def flush(self, seconds: float = Timings.audit) -> None:
        """Write the entries that wait, for about `seconds`. Raises nothing: entries that the database does not take now
        wait for the next `flush`, entries that it can never take are dropped."""
        if self._database is None:
            self._waiting.clear()
            return
        deadline = time.monotonic() + seconds
        if not self._writing.acquire(timeout=seconds):
            return
        try:
            self._write_waiting(self._database, deadline)
        except (ServerUnavailableError, SQLAlchemyError) as error:
            self._complain("", "cannot write the audit log now", entries=len(self._waiting), reason=str(error))
        finally:
            self._writing.release()

    def _write_waiting(self, database: Database, deadline: float) -> None:
        with self._lock:
            entries = list(self._waiting)
        try:
            self._write(database, entries, deadline)
        except UNWRITABLE:  # of one of them at least
            for entry in entries:
                try:
                    self._write(database, [entry], deadline)
                except UNWRITABLE as error:
                    log.error("audit entry dropped: the database cannot hold it", entry=repr(entry), reason=str(error))
                    self._forget([entry])

    def _write(self, database: Database, entries: list[dict[str, Any]], deadline: float) -> None:
        if entries:
            left = max(0.0, deadline - time.monotonic())
            database.write(lambda connection: _insert(connection, entries, self._refused_kept), left)
            self._forget(entries)

    def _forget(self, entries: list[dict[str, Any]]) -> None:
        with self._lock:
            for _ in entries:  # more may have come, and the oldest gone for them
                if self._waiting and self._waiting[0] in entries:
                    self._waiting.popleft()

    def read(self, after: int, most: int, tenant: str | None) -> list[AuditEntry]:
        """Return the newest entries after `after`, of one tenant or of all, the oldest first."""
        if self._database is None:
            return []
        asked = select(audit).where(audit.c.serial > after).order_by(audit.c.serial.desc())
        if tenant is not None:
            asked = asked.where(audit.c.tenant == tenant)
        asked = asked.limit(min(most or MAX_PAGE, MAX_PAGE))
        rows = self._database.read(lambda connection: connection.execute(asked).all())
        return [AuditEntry(**row._mapping) for row in reversed(rows)]


def _insert(connection: Connection, entries: list[dict[str, Any]], refused_kept: int) -> None:
    connection.execute(insert(audit), entries)
    refused = audit.c.outcome.in_(REFUSALS)
    for which, kept in ((refused, refused_kept), (~refused, KEPT)):
        first = select(audit.c.serial).where(which).order_by(audit.c.serial.desc()).offset(kept).limit(1)
        serial = connection.execute(first).scalar()
        if serial is not None:
            connection.execute(delete(audit).where(which, audit.c.serial <= serial))
