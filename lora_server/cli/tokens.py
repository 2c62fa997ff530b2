"""Access tokens and their roles."""

from __future__ import annotations

import os
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, one_line_errors, print_json
from lora_server.cli.local import DataDirOption, RegistryOption, ask_access

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

COLUMNS = ("id", "tenant", "role", "made", "state", "note")

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Access tokens and their roles.")
TokenId = Annotated[str, typer.Argument(metavar="ID", help="Id of a token, from `tokens list`.")]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="Write the token to this file, mode 0600, instead of stdout. (default: none)"),
]


@app.command("create")
@one_line_errors()
def create(
    role: Annotated[str, typer.Option(help="admin, publisher, engine or viewer.")],
    tenant: Annotated[str, typer.Option(help="Tenant of the token. (default: the operator, or the caller's own)")] = "",
    note: Annotated[str, typer.Option(help="Note for `tokens list`. (default: none)")] = "",
    file: FileOption = None,
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Create a token. It is printed once and cannot be shown again."""
    from lora_server.wire import lora_server_pb2 as pb

    request = pb.CreateTokenRequest(tenant=tenant, role=role, note=note)
    _hand_over(ask_access(server, data_dir, registry, "CreateToken", request), file, as_json)


@app.command("list")
@one_line_errors()
def list_tokens(
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """List tokens, without their secrets."""
    from lora_server import terminal
    from lora_server.wire import lora_server_pb2 as pb
    from lora_server.wire.listing import all_pages

    ask = partial(ask_access, server, data_dir, registry, "ListTokens")
    tokens = sorted(all_pages(ask, pb.ListTokensRequest).tokens, key=lambda one: one.created)
    if as_json:
        print_json([_row(one) for one in tokens])
        return
    terminal.table(terminal.open_console(), COLUMNS, [_cells(one) for one in tokens], left=COLUMNS, wrapped="note")


@app.command("rotate")
@one_line_errors()
def rotate(
    token: TokenId,
    overlap: Annotated[float, typer.Option(help="Seconds for which the old secret stays valid.")] = 3600.0,
    file: FileOption = None,
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give a token a new secret. Leases made with the old one go on."""
    from lora_server.wire import lora_server_pb2 as pb

    request = pb.RotateTokenRequest(id=token, overlap_seconds=overlap)
    _hand_over(ask_access(server, data_dir, registry, "RotateToken", request), file, as_json)


@app.command("revoke")
@one_line_errors()
def revoke(
    token: TokenId,
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Revoke a token; takes effect within two seconds.

    Leases that were made with it end.
    """
    from lora_server.wire import lora_server_pb2 as pb

    reply = ask_access(server, data_dir, registry, "RevokeToken", pb.RevokeTokenRequest(id=token))
    if as_json:
        print_json(_row(reply))
    else:
        typer.echo(f"{reply.id}: revoked")


def _hand_over(reply: pb.Token, file: Path | None, as_json: bool) -> None:
    if file is not None:
        _write(file, reply.text)
    if as_json:
        print_json(_row(reply) | ({} if file is not None else {"token": reply.text}))
    elif file is not None:
        typer.echo(f"{reply.id}: in {file}")
    else:
        typer.echo(reply.text)


def _write(file: Path, text: str) -> None:
    """Write a file for its owner alone, and replace an existing one atomically."""
    from lora_server.errors import ConfigError

    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{text}\n")
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(
            f"--file {file}: cannot be written ({error.strerror}); the token was made: revoke it, and try again"
        ) from error


def _row(token: pb.Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "tenant": token.tenant or None,
        "role": token.role,
        "note": token.note,
        "created": token.created,
        "revoked": token.revoked or None,
        "overlap_until": token.overlap_until or None,
    }


def _cells(token: pb.Token) -> list[str]:
    made = datetime.fromtimestamp(token.created).astimezone().isoformat(" ", "minutes")
    return [token.id, token.tenant or "-", token.role, made, "revoked" if token.revoked else "good", token.note]
