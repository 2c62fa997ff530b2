"""Access commands that use the database directly, without a server: to create the first token, or if all are lost."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server.cli.call import ask

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="The server's: use its database directly, without a token. (default: ask the server)"
    ),
]
RegistryOption = Annotated[
    str,
    typer.Option("--registry", help="The server's postgresql:// URL, used like --data-dir. (default: none)"),
]


def ask_access(server: str, data_dir: Path | None, registry: str, method: str, request: Any) -> Any:
    """Call a method of Access at the server; with a directory or registry, run it on that database in this process.

    Raises the server's errors, ConfigError.
    """
    if data_dir is None and not registry:
        return ask(server, "Access", method, request)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result, and this writes log lines
        return _ask_database(registry or _file_of(data_dir, method == "CreateToken"), method, request)


def _ask_database(url: str, method: str, request: Any) -> Any:
    from lora_server.access.gate import Gate
    from lora_server.access.identity import OPERATOR, Identity, Role
    from lora_server.access.rights import CHANGES
    from lora_server.access.service import AccessService
    from lora_server.registry.database import Database

    database = Database(url)
    try:
        gate = Gate(database)
        try:
            service = AccessService(gate, lambda who, name: name, lambda start: False)
            who = Identity(OPERATOR, Role.ADMIN, "local")
            reply = getattr(service, method)(request, who)
            if f"Access/{method}" in CHANGES:
                subject = getattr(reply, "id", "") or getattr(reply, "name", "")
                gate.changed(who, f"Access/{method}", f"{subject} (beside the database)", None)
            return reply
        finally:
            gate.close()
    finally:
        database.close()


def _file_of(data_dir: Path | None, makes: bool) -> str:
    """Return the URL of a data directory's database. `makes`: make the directory, before a server's first start."""
    from lora_server.errors import ConfigError
    from lora_server.registry.database import FILE

    if makes and data_dir is not None:
        with contextlib.suppress(OSError):  # the error below says it
            data_dir.mkdir(parents=True, exist_ok=True)
    if data_dir is None or not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir}: got no directory, expected that of lora-server serve")
    return f"sqlite:///{(data_dir / FILE).resolve()}"
