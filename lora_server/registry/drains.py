"""What drains, and until when, so that a controller that is killed meanwhile has a successor who knows it."""

from __future__ import annotations

import time

from sqlalchemy import BigInteger, Column, Connection, Float, String, Table, delete, insert, select

from lora_server.registry.database import Database, metadata

KEPT_SECONDS = 30 * 86400.0  # of what nobody took back

deadlines = Table(
    "deadlines",
    metadata,
    Column("handle", BigInteger, primary_key=True, autoincrement=False),
    Column("until", Float, nullable=False),  # seconds since 1970
)

drained = Table(
    "drained",
    metadata,
    Column("run", String(64), primary_key=True),  # a server that is started anew has another
    Column("since", Float, nullable=False),
)


class Drains:
    """Thread-safe. Everything raises ServerUnavailableError where the database is not reached."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def cut_off(self, handle: int, seconds: float) -> None:
        """An adapter is about to drain; in so long whoever holds it still is cut off."""
        now = time.time()

        def work(connection: Connection) -> None:
            over = (deadlines.c.handle == handle) | (deadlines.c.until < now - KEPT_SECONDS)
            connection.execute(delete(deadlines).where(over))
            connection.execute(insert(deadlines).values(handle=handle, until=now + seconds))

        self._database.write(work)

    def deadlines(self) -> dict[int, float]:
        """By handle, in seconds since 1970; of one that does not drain after all it means nothing."""
        query = select(deadlines.c.handle, deadlines.c.until)
        return self._database.read(lambda connection: {row[0]: row[1] for row in connection.execute(query)})

    def drain(self, run: str) -> None:
        """This server admits nobody any more."""
        now = time.time()

        def work(connection: Connection) -> None:
            over = (drained.c.run == run) | (drained.c.since < now - KEPT_SECONDS)
            connection.execute(delete(drained).where(over))
            connection.execute(insert(drained).values(run=run, since=now))

        self._database.write(work)

    def resume(self, run: str) -> None:
        """It does again."""
        self._database.write(lambda connection: connection.execute(delete(drained).where(drained.c.run == run)))

    def drained(self) -> set[str]:
        """Servers that admit nobody."""
        return self._database.read(lambda connection: set(connection.execute(select(drained.c.run)).scalars()))
