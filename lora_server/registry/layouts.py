"""The layout that a server was resized to, which outlives it."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import BigInteger, Column, String, Table, select

from lora_server.registry.database import Database, metadata, put_row

layouts = Table(
    "layouts",
    metadata,
    Column("server", String(300), primary_key=True),  # its address where servers share the database; else empty
    Column("given", String(64), nullable=False),  # --layout when it was resized
    Column("layout", String(64), nullable=False),
    Column("generation", BigInteger, nullable=False),  # of the placement
)


class PlacedLayout(NamedTuple):
    """A layout, and the generation of its placement."""

    layout: str
    generation: int = 1


class Layouts:
    """The layout of one server. Thread-safe. All methods raise ServerUnavailableError if the database is
    unreachable."""

    def __init__(self, database: Database, address: str, given: str) -> None:
        """`given`: the server's --layout. With another than when it was resized, it serves that."""
        self._database, self._given = database, given
        self._server = address if database.shared else ""

    def current(self) -> PlacedLayout:
        """Return the layout to serve."""
        columns = layouts.c.given, layouts.c.layout, layouts.c.generation
        query = select(*columns).where(layouts.c.server == self._server)
        row = self._database.read(lambda connection: connection.execute(query).one_or_none())
        return (
            PlacedLayout(row.layout, row.generation) if row and row.given == self._given else PlacedLayout(self._given)
        )

    def put(self, placed: PlacedLayout) -> None:
        """Store the layout that a restart is to serve."""
        row = {"server": self._server, "given": self._given, **placed._asdict()}
        over = layouts.c.server == self._server
        self._database.write(lambda connection: put_row(connection, layouts, over, row))
