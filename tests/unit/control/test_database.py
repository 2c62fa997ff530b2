"""The registry's database: transactions, locks, and what it refuses to open."""

import sqlite3
import stat
from pathlib import Path

import pytest

from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.registry.database import FILE, Database, count, counted


def url(directory):
    return f"sqlite:///{directory / FILE}"


@pytest.fixture
def database(tmp_path):
    opened = Database(url(tmp_path))
    yield opened
    opened.close()


def test_the_file_is_private_and_crash_safe(database, tmp_path):
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    ask = ("journal_mode", "synchronous", "foreign_keys")
    told = database.read(lambda connection: [connection.exec_driver_sql(f"PRAGMA {one}").scalar() for one in ask])
    assert told == ["wal", 2, 1]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_transaction_that_fails_leaves_nothing(database):
    def fail(connection):
        count(connection, "handles")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        database.write(fail)
    assert database.read(lambda connection: counted(connection, "handles")) == 0


def test_a_writer_waits_for_the_lock_until_its_deadline(database, tmp_path):
    holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServerUnavailableError, match=r"registry\.sqlite: not reached within 0.1 s: database is locked"):
        database.write(lambda connection: count(connection, "handles"), 0.1)
    assert database.read(lambda connection: counted(connection, "schema")) == 1, "who reads does not wait"
    holder.execute("ROLLBACK")
    assert database.write(lambda connection: count(connection, "handles")) == 1
    holder.close()


@pytest.mark.parametrize(("given", "said"), [
    ("mysql://host/x", r"--registry: got mysql://\.\.\., expected postgresql://USER@HOST/DATABASE"),
    ("nothing", "--registry: got no URL"),
    ("sqlite:////proc/none/registry.sqlite", "cannot be made or written to"),
])  # fmt: skip
def test_a_bad_url_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        Database(given)


def test_other_files_and_newer_schemas_are_left_alone_and_nothing_stays_open(tmp_path):
    before = set(Path("/proc/self/fd").iterdir())
    first = Database(url(tmp_path))
    first.write(lambda connection: count(connection, "schema"))
    first.close()
    with pytest.raises(ConfigError, match="written by a newer server: got schema 2, expected 1 at most"):
        Database(url(tmp_path))
    assert set(Path("/proc/self/fd").iterdir()) == before
    (tmp_path / FILE).write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match="cannot be opened: file is not a database; expected a file of SQLite"):
        Database(url(tmp_path))
