"""Which adapters were added by name, in which version, and what their names meant before; what a directory's were.

A row outlives every process. A handle is given once, whichever server asks and whatever was restarted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)

from lora_server.errors import AdapterExistsError, ConfigError, ServerUnavailableError
from lora_server.registry.attempts import Attempts, forget
from lora_server.registry.database import Database, count, counted, counters, metadata
from lora_server.registry.drains import Drains

HANDLES = 64  # taken at a time; those that a killed server had left are nobody's
EARLIER = 8  # versions of a name that are kept to go back to
CHANGES = "changes"

versions = Table(
    "versions",
    metadata,
    Column("handle", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(200), nullable=False, index=True),
    Column("version", String(64), nullable=False),
    Column("listed", Boolean, nullable=False),  # the name means it; otherwise it did so earlier
    Column("pinned", Boolean, nullable=False),
    Column("changed", BigInteger, nullable=False),  # the higher, the later
    Column("added", Float, nullable=False),  # seconds since 1970
    Column("record", Text, nullable=False),
)
Index("one_is_listed", versions.c.name, unique=True, sqlite_where=versions.c.listed, postgresql_where=versions.c.listed)

directories = Table(
    "directories",
    metadata,
    Column("place", String(64), primary_key=True),  # digest of `uri`, which may be longer than an index takes
    Column("uri", Text, nullable=False),
    Column("stamp", Text, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("record", Text, nullable=False),
)


class Version(NamedTuple):
    """One row of `versions`; `record` is the controller's."""

    handle: int
    name: str
    version: str
    listed: bool
    pinned: bool
    added: float
    record: str


class Seen(NamedTuple):
    """What an adapter of a directory was when it was read, and its files had this stamp."""

    uri: str
    stamp: str
    pinned: bool
    record: str


class Ledger:
    """Thread-safe. Everything raises ServerUnavailableError where the database is not reached."""

    def __init__(self, database: Database, model: str) -> None:
        """Give the database this base model, which every later write checks. Raises ConfigError where it has another.

        An empty file takes a new base model, since --data-dir is locked; a PostgreSQL that may be shared never does.
        """
        self._database, self.shared = database, database.shared
        self.drains, self.attempts = Drains(database), Attempts(database)
        own = f"model {hashlib.sha256(model.encode()).hexdigest()[:40]}"
        other = (
            f"registry {database.shown}: belongs to another base model than --base-model's; give each base model a "
            "--data-dir, or a --registry, of its own"
        )
        if not database.write(lambda connection: _take(connection, own, exclusive=not self.shared)):
            raise ConfigError(other)

        def check(connection: Connection) -> None:
            if own not in _models(connection):
                raise ServerUnavailableError(f"{other}; nothing was changed")

        database.check = check

    # -- what there is

    def changes(self) -> int:
        """It goes up with every change, whoever makes it."""
        return self._database.read(lambda connection: counted(connection, CHANGES))

    def listed(self) -> list[Version]:
        """All that names mean."""
        return self._select(versions.c.listed)

    def of(self, name: str) -> list[Version]:
        """Of one name: what it means, then what it meant before, the last first."""
        return self._select(versions.c.name == name)

    def all(self) -> list[Version]:
        """Earlier ones too."""
        return self._select(versions.c.handle > 0)

    def _select(self, condition: ColumnElement[bool]) -> list[Version]:
        columns = [versions.c[name] for name in Version._fields]
        query = select(*columns).where(condition).order_by(versions.c.listed.desc(), versions.c.changed.desc())
        return self._database.read(lambda connection: [Version(*row) for row in connection.execute(query)])

    # -- changes

    def take_handles(self, above: int = 0) -> range:
        """Some that nobody else ever gets, higher than `above`."""

        def work(connection: Connection) -> range:
            first = max(count(connection, "handles", 0), above)
            count(connection, "handles", first + HANDLES - counted(connection, "handles"))
            return range(first + 1, first + HANDLES + 1)

        return self._database.write(work)

    def list(self, new: Version, earlier: Version | None = None) -> None:
        """The name means it from now on, and `earlier` no more; None: it meant nothing.

        Raises AdapterExistsError where it means something else by now.
        """

        def work(connection: Connection) -> None:
            changed = count(connection, CHANGES)
            found = connection.execute(
                select(versions.c.handle).where(versions.c.name == new.name, versions.c.listed)
            ).scalar()
            if found == new.handle:  # the answer to an earlier try was lost
                return
            if found is not None and (earlier is None or found != earlier.handle):
                raise AdapterExistsError(f"adapter {new.name!r}: was changed meanwhile by somebody else; try again")
            if earlier is not None:
                connection.execute(delete(versions).where(versions.c.handle == earlier.handle))
                _insert(connection, earlier._replace(listed=False, pinned=False), changed)
            same = (versions.c.name == new.name) & (versions.c.version == new.version)
            connection.execute(delete(versions).where(same))
            _insert(connection, new._replace(listed=True), changed)
            forget(connection, new.name)
            _forget_oldest(connection, new.name)

        self._database.write(work)

    def rewrite(self, same: Version) -> None:
        """Something about a listed version is told otherwise: pinned, or where its files are."""

        def work(connection: Connection) -> None:
            values = {"pinned": same.pinned, "record": same.record, "changed": count(connection, CHANGES)}
            connection.execute(update(versions).where(versions.c.handle == same.handle).values(values))

        self._database.write(work)

    def remove(self, name: str) -> None:
        """With all that it meant before."""

        def work(connection: Connection) -> None:
            count(connection, CHANGES)
            connection.execute(delete(versions).where(versions.c.name == name))
            forget(connection, name)

        self._database.write(work)

    # -- directories

    def seen(self) -> dict[str, Seen]:
        """What adapters of directories were when they were read, by uri."""
        columns = [directories.c[name] for name in Seen._fields]
        rows = self._database.read(lambda connection: connection.execute(select(*columns)).all())
        return {row[0]: Seen(*row) for row in rows}

    def pinned_places(self) -> set[str]:
        """The uris of those that are pinned."""
        query = select(directories.c.uri).where(directories.c.pinned)
        return set(self._database.read(lambda connection: connection.execute(query).scalars().all()))

    def pin_seen(self, uri: str, pinned: bool) -> None:
        """Also of one that was never read."""

        def work(connection: Connection) -> None:
            place = _place(uri)
            values = {"uri": uri, "stamp": "", "record": "", "pinned": pinned}
            found = connection.execute(update(directories).where(directories.c.place == place).values(pinned=pinned))
            if pinned and not found.rowcount:
                connection.execute(insert(directories).values(place=place, **values))

        self._database.write(work)

    def see(self, read: Iterable[Seen]) -> None:
        """They were read just now, or pinned."""
        rows = [{"place": _place(one.uri), **one._asdict()} for one in read]

        def work(connection: Connection) -> None:
            if rows:
                connection.execute(delete(directories).where(directories.c.place.in_([row["place"] for row in rows])))
                connection.execute(insert(directories), rows)

        self._database.write(work)


def _place(uri: str) -> str:
    return hashlib.sha256(uri.encode(errors="surrogateescape")).hexdigest()


def _insert(connection: Connection, one: Version, changed: int) -> None:
    connection.execute(insert(versions).values(**one._asdict(), changed=changed))


def _forget_oldest(connection: Connection, name: str) -> None:
    earlier = (versions.c.name == name) & ~versions.c.listed
    kept = select(versions.c.handle).where(earlier).order_by(versions.c.changed.desc()).limit(EARLIER)
    connection.execute(delete(versions).where(earlier, versions.c.handle.not_in(kept)))


def _models(connection: Connection) -> Sequence[str]:
    return connection.execute(select(counters.c.name).where(counters.c.name.like("model %"))).scalars().all()


def _take(connection: Connection, own: str, exclusive: bool) -> bool:
    """Whether the database has this model from now on; of several servers that start, one is the first."""
    count(connection, CHANGES, 0)
    models = _models(connection)
    if models and exclusive and not connection.execute(select(func.count()).select_from(versions)).scalar():
        connection.execute(delete(counters).where(counters.c.name.like("model %")))
        models = ()
    if not models:
        count(connection, own)
    return not models or own in models
