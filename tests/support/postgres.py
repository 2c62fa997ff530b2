"""A PostgreSQL of the tests' own, in a directory that goes with it; it takes a second to start."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from lora_server.demo import children
from lora_server.registry.database import FILE
from tests.support.serving import HANG_SECONDS, until

DATABASES = ("sqlite", pytest.param("postgresql", marks=pytest.mark.long))  # for `database_of`
OWNER = "postgres"  # the user that it runs as if we are root: it refuses to run as root


def binaries() -> Path | None:
    """Find the folder of `postgres` and `initdb`: on the PATH, or where Debian puts them; None if there is none."""
    places = [Path(found).resolve().parent] if (found := shutil.which("postgres")) else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((one for one in places if (one / "postgres").exists() and (one / "initdb").exists()), None)


@contextlib.contextmanager
def running_postgres(primary: str = "") -> Iterator[str]:
    """Run a PostgreSQL until the block or this process ends; yields its URL. Skips the test if none is installed.
    `primary`: the URL of another, which it follows until `pg_promote()`."""
    found = binaries()
    if found is None:
        pytest.skip("no PostgreSQL is installed here: make postgres")
    directory = Path(tempfile.mkdtemp(prefix="lora-pg-", dir="/tmp"))
    drop = []
    if os.geteuid() == 0:
        shutil.chown(directory, OWNER, OWNER)
        drop = ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"]
    data, process = directory / "data", None
    try:
        make = ["initdb", "-D", str(data), "-U", "lora", "-A", "trust", "--no-sync", "-E", "UTF8"]
        if primary:
            make = ["pg_basebackup", "-D", str(data), "-U", "lora", "-h", host_of(primary), "-R", "-c", "fast"]
        subprocess.run(
            [*drop, str(found / make[0]), *make[1:]], check=True, capture_output=True, timeout=HANG_SECONDS, cwd="/"
        )
        serve = [*drop, str(found / "postgres"), "-D", str(data), "-k", str(directory), "-h", "", "-F"]
        log = (directory / "log").open("wb")
        with log:
            process = subprocess.Popen(children.own(serve), stdout=log, stderr=log, cwd="/")
        url = f"postgresql://lora@/postgres?host={directory}"
        until(lambda: answers(url), "PostgreSQL answers", HANG_SECONDS)
        yield url
    finally:
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(HANG_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def host_of(url: str) -> str:
    """The directory of its socket."""
    return url.partition("host=")[2]


@contextlib.contextmanager
def database_of(kind: str, directory: Path) -> Iterator[str]:
    """The URL of an empty database: "sqlite", in a directory, or "postgresql"."""
    if kind == "sqlite":
        yield f"sqlite:///{directory / FILE}"
        return
    with running_postgres() as found:
        yield found


@contextlib.contextmanager
def read_only(url: str) -> Iterator[None]:
    """Make the database read-only within the block, like a standby, or a primary that a failover replaced."""

    def set_to(value: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
            connection.execute("SELECT pg_reload_conf()")
        until(lambda: shown() == value, f"PostgreSQL is read-only: {value}", HANG_SECONDS)

    def shown() -> str:
        with psycopg.connect(url) as connection:
            return connection.execute("SHOW default_transaction_read_only").fetchone()[0]

    set_to("on")
    try:
        yield
    finally:
        set_to("off")


def answers(url: str) -> bool:
    """Whether it takes connections."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
