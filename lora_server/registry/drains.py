"""Drains: adapters that drain, with their deadlines, and drained servers. A controller's successor continues them."""

from __future__ import annotations

import time

from sqlalchemy import BigInteger, Column, Float, String, Table, delete, select

from lora_server.registry.database import Database, metadata, put_row

KEPT_SECONDS = 30 * 86400.0  # until an entry that was never removed is deleted

deadlines = Table(
    "deadlines",
    metadata,
    Column("handle", BigInteger, primary_key=True, autoincrement=False),
    Column("until", Float, nullable=False),  # seconds since 1970
)

drained = Table(
    "drained",
    metadata,
    Column("run", String(64), primary_key=True),  # a new server has a new run
    Column("since", Float, nullable=False),
)


class Drains:
    """Deadlines of draining adapters, and drained servers. Thread-safe. All methods raise ServerUnavailableError if the
    database is unreachable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def cut_off(self, handle: int, seconds: float) -> None:
        """Store that an adapter drains: its remaining holders are cut off after `seconds`."""
        now = time.time()
        over = (deadlines.c.handle == handle) | (deadlines.c.until < now - KEPT_SECONDS)
        row = {"handle": handle, "until": now + seconds}
        self._database.write(lambda connection: put_row(connection, deadlines, over, row))

    def deadlines(self) -> dict[int, float]:
        """Return the deadlines by handle, in seconds since 1970. Ignore those of handles that do not drain."""
        query = select(deadlines.c.handle, deadlines.c.until)
        return self._database.read(lambda connection: {row[0]: row[1] for row in connection.execute(query)})

    def drain(self, run: str) -> None:
        """Store that the server of this run is drained."""
        now = time.time()
        over = (drained.c.run == run) | (drained.c.since < now - KEPT_SECONDS)
        self._database.write(lambda connection: put_row(connection, drained, over, {"run": run, "since": now}))

    def resume(self, run: str) -> None:
        """Remove the drain of the server of this run."""
        self._database.write(lambda connection: connection.execute(delete(drained).where(drained.c.run == run)))

    def drained(self) -> set[str]:
        """Return the runs of the drained servers."""
        return self._database.read(lambda connection: set(connection.execute(select(drained.c.run)).scalars()))
