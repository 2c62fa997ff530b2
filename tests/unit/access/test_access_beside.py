"""Tokens and tenants beside the database, without a server: in SQLite, and in a PostgreSQL."""

from __future__ import annotations

import contextlib
import stat

import pytest
from typer.testing import CliRunner

from lora_server.access import tokens
from lora_server.access.gate import Gate
from lora_server.access.identity import Role
from lora_server.cli import app
from lora_server.registry.database import Database
from tests.support.postgres import database_of


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_first_token_is_made_beside_the_database(tmp_path, kind):
    with database_of(kind, tmp_path) as url:
        beside = ["--data-dir", str(tmp_path)] if kind == "sqlite" else ["--registry", url]
        made_beside(tmp_path / "admin", beside)
        database = Database(url)
        with contextlib.closing(database), contextlib.closing(Gate(database)) as gate:
            assert gate.required and gate.identify((tmp_path / "admin").read_text().strip()).role is Role.ADMIN
            assert gate.tenant("acme").max_bytes == 10 << 30


def test_beside_what_is_no_directory_nothing_is_made(tmp_path):
    none = CliRunner().invoke(app, ["tokens", "list", "--data-dir", str(tmp_path / "none")])
    assert (none.exit_code, "got no directory" in none.stderr) == (2, True)


def made_beside(file, beside):
    def cli(*arguments):
        return CliRunner().invoke(app, arguments)

    done = cli("tokens", "create", "--role", "admin", *beside, "--file", str(file))
    assert done.exit_code == 0, done.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and tokens.parse(file.read_text().strip())
    shown = cli("audit", *beside, "--json")
    assert '"call": "Access/CreateToken"' in shown.stdout
    made = cli("tenants", "set", "acme", "--max-bytes", "10GiB", *beside)
    assert made.exit_code == 0 and "10.0 GiB" in made.stdout
    listed = cli("tokens", "list", *beside)
    assert "admin" in listed.stdout and "good" in listed.stdout
