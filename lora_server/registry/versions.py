"""The ledger: versions of adapters that were added by name, present and earlier, and records of directories' adapters.

Rows outlive every process. A handle is given out once, across all servers and restarts.
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

HANDLES = 64  # taken at a time; those that a killed server had left over are never used
EARLIER = 8  # versions of a name that are kept to go back to
CHANGES = "changes"

versions = Table(
    "versions",
    metadata,
    Column("handle", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(200), nullable=False, index=True),
    Column("version", String(64), nullable=False),
    Column("listed", Boolean, nullable=False),  # it is the name's present version; otherwise an earlier one
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
    """The record that was made of a directory's adapter when its files had this stamp."""

    uri: str
    stamp: str
    pinned: bool
    record: str


class Ledger:
    """The rows of versions and of directories' adapters. Thread-safe. All methods raise ServerUnavailableError if the
    database is unreachable."""

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

        database.checks.append(check)

    # -- what there is

    def changes(self) -> int:
        """Return the count of changes, which every server's changes increase."""
        return self._database.read(lambda connection: counted(connection, CHANGES))

    def listed(self) -> list[Version]:
        """Return the present version of every name."""
        return self._select(versions.c.listed)

    def of(self, name: str) -> list[Version]:
        """Return a name's versions: the present one, then earlier ones, the latest first."""
        return self._select(versions.c.name == name)

    def all(self) -> list[Version]:
        """Return all versions, earlier ones too."""
        return self._select(versions.c.handle > 0)

    def _select(self, condition: ColumnElement[bool]) -> list[Version]:
        columns = [versions.c[name] for name in Version._fields]
        query = select(*columns).where(condition).order_by(versions.c.listed.desc(), versions.c.changed.desc())
        return self._database.read(lambda connection: [Version(*row) for row in connection.execute(query)])

    # -- changes

    def take_handles(self, above: int = 0) -> range:
        """Reserve HANDLES handles higher than `above`, which no other caller ever gets."""

        def work(connection: Connection) -> range:
            first = max(count(connection, "handles", 0), above)
            count(connection, "handles", first + HANDLES - counted(connection, "handles"))
            return range(first + 1, first + HANDLES + 1)

        return self._database.write(work)

    def list(self, new: Version, earlier: Version | None = None) -> None:
        """Make a version its name's present one, in place of `earlier`; None: the name is new.

        Raises AdapterExistsError if another version is the present one by now.
        """

        def work(connection: Connection) -> None:
            changed = count(connection, CHANGES)
            found = connection.execute(
                select(versions.c.handle).where(versions.c.name == new.name, versions.c.listed)
            ).scalar()
            if found == new.handle:  # the answer to an earlier try was lost
                return
            if found is not None and (earlier is None or found != earlier.handle):
                raise AdapterExistsError(f"adapter {new.name!r}: was changed by another call meanwhile; try again")
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
        """Update the pin and the record of a listed version, for example after its files moved."""

        def work(connection: Connection) -> None:
            values = {"pinned": same.pinned, "record": same.record, "changed": count(connection, CHANGES)}
            connection.execute(update(versions).where(versions.c.handle == same.handle).values(values))

        self._database.write(work)

    def remove(self, name: str) -> None:
        """Remove a name with all its versions."""

        def work(connection: Connection) -> None:
            count(connection, CHANGES)
            connection.execute(delete(versions).where(versions.c.name == name))
            forget(connection, name)

        self._database.write(work)

    # -- directories

    def seen(self) -> dict[str, Seen]:
        """Return the records of directories' adapters, by URI."""
        columns = [directories.c[name] for name in Seen._fields]
        rows = self._database.read(lambda connection: connection.execute(select(*columns)).all())
        return {row[0]: Seen(*row) for row in rows}

    def pinned_places(self) -> set[str]:
        """Return the URIs of the pinned adapters of directories."""
        query = select(directories.c.uri).where(directories.c.pinned)
        return set(self._database.read(lambda connection: connection.execute(query).scalars().all()))

    def pin_seen(self, uri: str, pinned: bool) -> None:
        """Pin or unpin a directory's adapter, also one without a record."""

        def work(connection: Connection) -> None:
            place = _place(uri)
            values = {"uri": uri, "stamp": "", "record": "", "pinned": pinned}
            found = connection.execute(update(directories).where(directories.c.place == place).values(pinned=pinned))
            if pinned and not found.rowcount:
                connection.execute(insert(directories).values(place=place, **values))

        self._database.write(work)

    def see(self, read: Iterable[Seen]) -> None:
        """Store records of directories' adapters, in place of earlier ones."""
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
    """Give an unused database this model; return whether the database has it. Transactions run one after another."""
    count(connection, CHANGES, 0)
    models = _models(connection)
    if models and exclusive and not connection.execute(select(func.count()).select_from(versions)).scalar():
        connection.execute(delete(counters).where(counters.c.name.like("model %")))
        models = ()
    if not models:
        count(connection, own)
    return not models or own in models
