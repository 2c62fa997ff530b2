"""The database of a server: what it says where it cannot be had, and what a kill in the middle leaves of it."""

import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import select

from lora_server.demo import children
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.registry.database import FILE, Database, count, counted, counters

ADDER = """
import sys
from lora_server.registry.database import Database, count
database = Database(sys.argv[1])
def both(connection):
    return count(connection, "left"), count(connection, "right")
while True:
    print(database.write(both)[0], flush=True)
"""


def url(directory):
    return f"sqlite:///{directory / FILE}"


@pytest.fixture
def database(tmp_path):
    opened = Database(url(tmp_path))
    yield opened
    opened.close()


def test_it_is_a_private_file_that_is_safe_against_a_crash(database, tmp_path):
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    ask = ("journal_mode", "synchronous", "foreign_keys")
    told = database.read(lambda connection: [connection.exec_driver_sql(f"PRAGMA {one}").scalar() for one in ask])
    assert told == ["wal", 2, 1]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_counters_go_up_by_one_whoever_counts(database, tmp_path):
    other, seen = Database(url(tmp_path)), []

    def many(opened):
        for _ in range(20):
            seen.append(opened.write(lambda connection: count(connection, "handles")))

    threads = [threading.Thread(target=many, args=(one,)) for one in (database, other, database)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    assert sorted(seen) == list(range(1, 61))


def test_a_transaction_that_fails_leaves_nothing(database):
    def fail(connection):
        count(connection, "handles")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        database.write(fail)
    assert database.read(lambda connection: counted(connection, "handles")) == 0


def test_who_finds_it_locked_waits_and_then_says_so(database, tmp_path):
    holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServerUnavailableError, match=r"registry\.sqlite: not reached within 0.1 s: database is locked"):
        database.write(lambda connection: count(connection, "handles"), 0.1)
    assert database.read(lambda connection: counted(connection, "schema")) == 1, "who reads does not wait"
    holder.execute("ROLLBACK")
    assert database.write(lambda connection: count(connection, "handles")) == 1
    holder.close()


def test_a_process_that_is_killed_while_it_writes_leaves_whole_transactions(tmp_path):
    told = 0
    for _ in range(3):
        command = children.own([sys.executable, "-c", ADDER, url(tmp_path)])
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            told = int(writer.stdout.readline())
        writer.kill()
        lines = writer.stdout.read().split()
        writer.stdout.close()
        writer.wait(60)
        told = max([told, *map(int, lines[:-1])])  # the last one may be cut
        with_it = Database(url(tmp_path))
        rows = dict(map(tuple, with_it.read(lambda connection: connection.execute(select(counters)).all())))
        with_it.close()
        assert rows["left"] == rows["right"] >= told, "what was told is there, and nothing is there by half"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mysql://host/x", r"--registry: got mysql://\.\.\., expected postgresql://USER@HOST/DATABASE"),
        ("nothing", "--registry: got no URL"),
        ("sqlite:////proc/none/registry.sqlite", "cannot be made or written to"),
    ],
)
def test_what_cannot_be_opened_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        Database(given)


def test_a_file_that_is_none_of_ours_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match="cannot be opened: file is not a database; expected a file of SQLite"):
        Database(url(tmp_path))


def test_a_newer_schema_is_left_alone(tmp_path):
    first = Database(url(tmp_path))
    first.write(lambda connection: count(connection, "schema"))
    first.close()
    with pytest.raises(ConfigError, match="written by a newer server: got schema 2, expected 1 at most"):
        Database(url(tmp_path))


def test_a_missing_driver_is_named():
    script = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from lora_server.registry.database import Database\n"
        "Database('postgresql://user:secret@localhost/x')"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "install lora-server[postgres]" in told.stderr and "secret" not in told.stderr.rpartition("ConfigError")[2]


def test_nothing_is_left_open(tmp_path):
    before = set(Path("/proc/self/fd").iterdir())
    opened = Database(url(tmp_path))
    opened.write(lambda connection: count(connection, "handles"))
    opened.close()
    assert set(Path("/proc/self/fd").iterdir()) == before
