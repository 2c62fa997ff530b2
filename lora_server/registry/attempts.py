"""Updates that failed or did not end, and why; an update is recorded also if its controller is killed during it."""

from __future__ import annotations

from sqlalchemy import Column, Connection, String, Table, Text, delete, select

from lora_server.registry.database import Database, metadata, put_row

attempts = Table(
    "attempts",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("why", Text, nullable=False),
)


def forget(connection: Connection, name: str) -> None:
    """Remove a name's failed update, in a transaction that changes the name's version."""
    connection.execute(delete(attempts).where(attempts.c.name == name))


class Attempts:
    """The failed updates, by adapter name. Thread-safe. All methods raise ServerUnavailableError if the database is
    unreachable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, str]:
        """Return why each adapter's last update failed, by name."""
        query = select(attempts.c.name, attempts.c.why)
        return self._database.read(lambda connection: {row[0]: row[1] for row in connection.execute(query)})

    def keep(self, name: str, why: str) -> None:
        """Store why an adapter's update failed, in place of an earlier reason."""
        over, row = attempts.c.name == name, {"name": name, "why": why}
        self._database.write(lambda connection: put_row(connection, attempts, over, row))

    def forget(self, name: str) -> None:
        """Remove an adapter's reason: an update succeeded, or the adapter is gone."""
        self._database.write(lambda connection: forget(connection, name))
