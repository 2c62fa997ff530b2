"""Updates that did not come to their end, and why: also that of a controller that was killed in it."""

from __future__ import annotations

from sqlalchemy import Column, Connection, String, Table, Text, delete, insert, select

from lora_server.registry.database import Database, metadata

attempts = Table(
    "attempts",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("why", Text, nullable=False),
)


def forget(connection: Connection, name: str) -> None:
    """In a transaction that changes what the name means."""
    connection.execute(delete(attempts).where(attempts.c.name == name))


class Attempts:
    """Thread-safe. Everything raises ServerUnavailableError where the database is not reached."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, str]:
        """Why, by name."""
        query = select(attempts.c.name, attempts.c.why)
        return self._database.read(lambda connection: {row[0]: row[1] for row in connection.execute(query)})

    def keep(self, name: str, why: str) -> None:
        """Of the last one."""

        def work(connection: Connection) -> None:
            forget(connection, name)
            connection.execute(insert(attempts).values(name=name, why=why))

        self._database.write(work)

    def forget(self, name: str) -> None:
        """It came to its end, or there is nothing to update any more."""
        self._database.write(lambda connection: forget(connection, name))
