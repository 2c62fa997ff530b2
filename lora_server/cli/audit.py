"""The audit log: every change, its caller and its outcome."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, one_line_errors, print_json
from lora_server.cli.local import DataDirOption, RegistryOption, ask_access
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

FOLLOW_SECONDS = 1.0


@one_line_errors()
def audit(
    follow: Annotated[bool, typer.Option(help="Print new entries until Ctrl-C.")] = False,
    most: Annotated[int, typer.Option(min=1, max=1000, help="Number of entries, newest.")] = 100,
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show changes and refused attempts.

    An entry has caller, call, subject and outcome. With --follow and --json each entry is one line of JSON.
    """
    from lora_server.wire import lora_server_pb2 as pb

    def entries(after: int) -> list[pb.AuditEntry]:
        return list(ask_access(server, data_dir, registry, "Audit", pb.AuditRequest(after=after, most=most)).entries)

    found = entries(0)
    if as_json and not follow:
        print_json([_row(one) for one in found])
        return
    try:
        last = _print(found, as_json, 0)
        while follow:
            time.sleep(FOLLOW_SECONDS)
            last = _print(entries(last), as_json, last)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print(entries: list[pb.AuditEntry], as_json: bool, last: int) -> int:
    for one in entries:
        typer.echo(json.dumps(_row(one)) if as_json else _line(one))
    return max([last, *(one.serial for one in entries)])


def _line(entry: pb.AuditEntry) -> str:
    at = datetime.fromtimestamp(entry.at).astimezone().isoformat(" ", "seconds")
    who = f"{entry.tenant or 'operator'}/{entry.role} {entry.token or '-'}"
    return f"{at}  {who}  {entry.call} {entry.subject}  {entry.outcome}{': ' if entry.reason else ''}{entry.reason}"


def _row(entry: pb.AuditEntry) -> dict[str, Any]:
    return fields(entry) | {"tenant": entry.tenant or None, "token": entry.token or None}
