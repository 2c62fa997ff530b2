"""The database of a server: an SQLite file, or a PostgreSQL. `metadata` has the tables of all modules.

A transaction is short. It is retried until a deadline while the database is busy or unreachable, so its `work` may run
more than once and must have no effect outside the database.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import structlog
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy import exc as sql
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.schema import CreateColumn
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from lora_server.config import ProcessConfig
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.timings import DEFAULTS, Timings

FILE = "registry.sqlite"
SCHEMA = 1  # higher where a table's columns mean something else than before
BUSY_SECONDS = 0.5  # of one try, while another process writes
STOPPED_SECONDS = 3.0  # then a PostgreSQL ends the transaction of a process that was stopped in it
MIN_PAUSE, MAX_PAUSE = 0.02, 0.5
_DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}
_READ_ONLY = "25006"  # SQLSTATE of a write on a PostgreSQL that is a standby, or became one in a failover
_PASSING = (_READ_ONLY, "23505", "25P03", "40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03")  # pass by
T = TypeVar("T")
Work = Callable[[Connection], T]
log = structlog.get_logger()

metadata = MetaData()
counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)


def count(connection: Connection, name: str, by: int = 1) -> int:
    """Add to a counter and return its new value. Other transactions that count the same wait until this one ends."""
    changed = update(counters).where(counters.c.name == name).values(value=counters.c.value + by)
    value = connection.execute(changed.returning(counters.c.value)).scalar()
    if value is None:
        connection.execute(insert(counters).values(name=name, value=by))
        return by
    return int(value)


def counted(connection: Connection, name: str) -> int:
    """Return a counter's value; 0 if it does not exist."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar() or 0)


def put_row(connection: Connection, table: Table, over: ColumnElement[bool], row: Mapping[str, Any]) -> None:
    """Delete the rows that are over, and insert one."""
    connection.execute(delete(table).where(over))
    connection.execute(insert(table).values(dict(row)))


def url_of(config: ProcessConfig) -> str:
    """Return the URL of --registry; without it, of a file in --data-dir or in the temporary run directory."""
    return config.registry or f"sqlite:///{(config.data_dir or config.run_dir).resolve() / FILE}"


class Database:
    """A connection pool that runs transactions. Thread-safe; any number of processes may open the same database."""

    def __init__(self, url: str, timings: Timings = DEFAULTS) -> None:
        """Create missing tables and columns. Raises ConfigError if the database cannot be opened, or is of a newer
        release."""
        parsed, self._stopping, self._seconds = _parsed(url), threading.Event(), timings.database
        self.checks: list[Work[object]] = []  # begin every write; raise where this process may not
        self.shown = parsed.render_as_string(hide_password=True)
        self.shared = parsed.get_backend_name() != "sqlite"
        try:
            if not self.shared and parsed.database:
                os.close(os.open(parsed.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._engine = create_engine(parsed, **_options(self.shared, timings.database))
        except ImportError as error:
            raise ConfigError(
                f"--registry {self.shown}: {error}; pip install '.[postgres]' in a checkout of lora-server"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{self._who()}: cannot be made or written to ({error.strerror}); expected a place where this user may "
                "create files: give --data-dir another"
            ) from error
        event.listen(self._engine, "handle_error", _leave_read_only)
        if not self.shared:
            event.listen(self._engine, "connect", _set_up)
            event.listen(self._engine, "begin", _begin)
        try:
            schema = self.write(self._prepare, timings.database_open)
        except (ServerUnavailableError, sql.SQLAlchemyError) as error:
            self.close()
            raise ConfigError(f"{self._who()}: cannot be opened: {_told(error)}; {self._cure()}") from error
        if schema > SCHEMA:
            self.close()
            raise ConfigError(
                f"{self._who()}: was written by a newer server: got schema {schema}, expected {SCHEMA} at most; start "
                "that release, or give this one another"
            )

    def read(self, work: Work[T]) -> T:
        """Run `work` in a read-only transaction and return its result. Raises ServerUnavailableError."""
        return self._transact(work, self._seconds, writes=False)

    def write(self, work: Work[T], seconds: float | None = None) -> T:
        """Run `work` in a transaction and return its result; the changes are on the disk then.

        Raises ServerUnavailableError. Nothing was changed then, unless the connection broke during the commit.
        """

        def checked(connection: Connection) -> T:
            for check in self.checks:
                check(connection)
            return work(connection)

        return self._transact(checked, self._seconds if seconds is None else seconds, writes=True)

    def session(self, seconds: float) -> Connection:
        """Open a connection to a PostgreSQL, whose statements are transactions; the database ends it after so long
        without one. The caller invalidates it, and closes it. Raises DBAPIError."""
        session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        session.exec_driver_sql(f"SET idle_session_timeout = {int(seconds * 1000)}")
        return session

    def close(self) -> None:
        """Close the pool without waiting; transactions that wait to be retried give up."""
        self._stopping.set()
        self._engine.dispose()

    def _transact(self, work: Work[T], seconds: float, writes: bool) -> T:
        engine, deadline = self._engine.execution_options(writes=writes), time.monotonic() + seconds

        def once() -> T:
            with engine.begin() as connection:
                return work(connection)

        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=lambda state: self._stopping.is_set() or time.monotonic() > deadline,
            wait=wait_random_exponential(MIN_PAUSE, max=MAX_PAUSE),
            sleep=self._pause,
            before_sleep=self._say,
            reraise=True,
        )
        try:
            return retrying(once)
        except sql.DBAPIError as error:
            if not _may_pass(error):
                raise
            raise ServerUnavailableError(f"{self._who()}: not reached within {seconds:g} s: {_told(error)}") from error

    def _pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def _prepare(self, connection: Connection) -> int:
        if self.shared:  # of several that start, one makes the tables
            connection.execute(text("SELECT pg_advisory_xact_lock(7400)"))
        metadata.create_all(connection)
        _add_columns(connection)
        return counted(connection, "schema") or count(connection, "schema", SCHEMA)

    def _say(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if state.attempt_number == 3:
            log.warning(
                "the registry's database is busy or away; trying again", registry=self.shown, reason=_told(error)
            )

    def _who(self) -> str:
        return (
            f"--registry {self.shown}" if self.shared else f"registry {self.shown.removeprefix('sqlite+pysqlite:///')}"
        )

    def _cure(self) -> str:
        if self.shared:
            return (
                "expected postgresql://USER@HOST/DATABASE of a running server, and a user that has the right to create "
                "tables there"
            )
        return "expected a file of SQLite: move it away to begin anew, or give --data-dir another directory"


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
        driver = _DRIVERS[parsed.drivername]
    except (sql.ArgumentError, KeyError, ValueError):
        scheme = url.partition("://")[0] if "://" in url else ""
        raise ConfigError(
            f"--registry: got {scheme + '://...' if scheme else 'no URL'}, expected postgresql://USER@HOST/DATABASE; "
            "or leave it away: then it is a file in --data-dir"
        ) from None
    return parsed.set(drivername=driver)


def _options(shared: bool, seconds: float) -> dict[str, Any]:
    if not shared:
        return {"connect_args": {"timeout": BUSY_SECONDS}}
    limits = (
        f"-c statement_timeout={int(seconds * 1000)} -c lock_timeout={int(BUSY_SECONDS * 1000)} "
        f"-c idle_in_transaction_session_timeout={int(STOPPED_SECONDS * 1000)}"
    )
    arguments = {"connect_timeout": 5, "tcp_user_timeout": int(seconds * 1000), "options": limits}
    return {"pool_pre_ping": True, "connect_args": arguments}


def _set_up(connection: sqlite3.Connection, _: object) -> None:
    """Configure an SQLite connection. Transactions are begun explicitly (`_begin`), so that none starts as a reader and
    fails at its first write."""
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _leave_read_only(context: ExceptionContext) -> None:
    """Close all connections to a database that became read-only: new ones reach the host that is writable now."""
    context.is_disconnect |= getattr(context.original_exception, "sqlstate", None) == _READ_ONLY


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _may_pass(error: BaseException) -> bool:
    """Return whether the same transaction may succeed later. Errors of a file that is no database are permanent."""
    if not isinstance(error, sql.DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        return isinstance(error, sql.OperationalError)
    return isinstance(error, sql.OperationalError) or getattr(error.orig, "sqlstate", None) in _PASSING


def _add_columns(connection: Connection) -> None:
    """Add the columns that tables of an earlier release lack. Each has a default in the database, for the rows that are
    there, and for servers of the earlier release that share it."""
    inspector = inspect(connection)
    for table in metadata.sorted_tables:
        present = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in present:
                added = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {added}"))


def _told(error: BaseException | None) -> str:
    """Return a driver's message on one line."""
    original = getattr(error, "orig", None) or getattr(error, "__cause__", None) or error
    original = getattr(original, "orig", None) or original
    return " ".join(str(original).split())[:300]


def database_of(config: ProcessConfig) -> Database:
    """Open a controller's database. Raises ConfigError."""
    return Database(url_of(config), config.timings)
