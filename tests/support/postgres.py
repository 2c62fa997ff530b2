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
OWNER = "postgres"  # who it runs as where we are root, whom it refuses


def binaries() -> Path | None:
    """Where `postgres` and `initdb` are: on the PATH, or where Debian puts them."""
    places = [Path(found).parent] if (found := shutil.which("postgres")) else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((one for one in places if (one / "postgres").exists() and (one / "initdb").exists()), None)


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Its URL; skips the test where it is not installed. It ends with the block, or with this process."""
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
        make = [*drop, str(found / "initdb"), "-D", str(data), "-U", "lora", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(make, check=True, capture_output=True, timeout=HANG_SECONDS, cwd="/")
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


@contextlib.contextmanager
def database_of(kind: str, directory: Path) -> Iterator[str]:
    """The URL of an empty database: "sqlite", in a directory, or "postgresql"."""
    if kind == "sqlite":
        yield f"sqlite:///{directory / FILE}"
        return
    with running_postgres() as found:
        yield found


def answers(url: str) -> bool:
    """Whether it takes connections."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
