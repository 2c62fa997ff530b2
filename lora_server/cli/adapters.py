"""Adapters of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, ask, print_json, run
from lora_server.cli.complete import adapter_names
from lora_server.units import size

if TYPE_CHECKING:
    from rich.console import Console

    from lora_server.wire import lora_server_pb2 as pb

COLUMNS = {"name": "<", "rank": ">", "size": ">", "state": "<", "clients": ">"}

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Adapters of a running server.")

NewName = Annotated[str, typer.Argument(metavar="NAME", help="What requests will call it.")]
KnownName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=adapter_names, help="An adapter.")]
SourceUrl = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="Its PEFT directory, as the server sees it, or a URL, s3:// and the like."),
]


@app.command("list")
def list_adapters(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """All adapters, what is wrong with some, who uses them."""

    def command() -> None:
        rows = _rows(server)
        if as_json:
            print_json(rows)
            return
        from lora_server import terminal

        show_list(rows, terminal.open_console())

    run(command)


@app.command("show")
def show_adapter(name: KnownName, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Everything about one adapter."""

    def command() -> None:
        from lora_server import terminal
        from lora_server.errors import UnknownAdapterError

        found = [row for row in _rows(server) if row["name"] == name]
        if not found:
            raise UnknownAdapterError(f"adapter {name!r}: not registered at {server}; see lora-server adapters list")
        row = found[0] | {"shards": _shards(server, found[0])}
        if as_json:
            print_json(row)
        else:
            show_one(row, terminal.open_console())

    run(command)


@app.command("add")
def add_adapter(
    name: NewName,
    source: SourceUrl,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(help="Seconds for validation and loading on every shard.")] = 120.0,
) -> None:
    """Validate an adapter, load it on every shard, then serve it."""

    def command() -> None:
        from lora_server import terminal
        from lora_server.cli.loading import loading
        from lora_server.wire import lora_server_pb2 as pb

        path = source if "://" in source else str(Path(source).absolute())
        request = pb.AddAdapterRequest(name=name, uri=path, wait_seconds=wait)
        with loading(server, name):
            row = _adapter(ask(server, "Adapters", "Add", request, wait + 10))
        if as_json:
            print_json(row)
        else:
            text = f"{name}: rank {row['lora_rank']}, {size(row['bytes'])}, version {row['version'][:12]}"
            terminal.say(terminal.open_console(), text)
        for warning in row["warnings"]:
            terminal.say(terminal.open_console(stderr=True), warning, "warning")

    run(command)


@app.command("remove")
def remove_adapter(name: KnownName, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Stop serving an adapter at once.

    Its weights go when the last request that holds it has ended.
    """

    def command() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        reply = ask(server, "Adapters", "Remove", pb.RemoveAdapterRequest(name=name))
        if as_json:
            print_json({"name": name, "holders": reply.holders})
        else:
            typer.echo(f"{name}: removed" + (f"; clients that still use it: {reply.holders}" if reply.holders else ""))

    run(command)


@app.command("pin")
def pin_adapter(
    name: KnownName,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(help="Seconds for loading on every shard.")] = 120.0,
) -> None:
    """Bring an adapter in, and keep it in every shard's memory.

    Refused where all that are pinned do not fit a shard's pool together.
    """

    def command() -> None:
        from lora_server.cli.loading import loading
        from lora_server.wire import lora_server_pb2 as pb

        with loading(server, name):
            row = _adapter(
                ask(server, "Adapters", "Pin", pb.PinAdapterRequest(name=name, wait_seconds=wait), wait + 10)
            )
        _show_pinned(row, as_json)

    run(command)


@app.command("unpin")
def unpin_adapter(name: KnownName, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Let an adapter make room as others do."""

    def command() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        _show_pinned(_adapter(ask(server, "Adapters", "Unpin", pb.UnpinAdapterRequest(name=name))), as_json)

    run(command)


# -- what is shown


def _show_pinned(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{row['name']}: {'pinned' if row['pinned'] else 'not pinned any more'}")


def show_list(rows: list[dict[str, Any]], console: Console) -> None:
    """One line each; what is wrong stands below."""
    from lora_server import terminal

    terminal.table(console, COLUMNS, [_cells(row) for row in rows], wrapped="name")
    for row in rows:
        for warning in row["warnings"]:
            terminal.say(console, f"{row['name']}: {warning}", "warning")
        if row["error"]:
            terminal.say(console, f"{row['name']}: {row['error']}", row["state"])


def _cells(row: dict[str, Any]) -> list[str]:
    if row["state"] == "refused":
        return [row["name"], "-", "-", "refused", "-"]
    return [row["name"], str(row["lora_rank"]), size(row["bytes"]), _state(row), f"{row['holders']:,}"]


def _state(row: dict[str, Any]) -> str:
    state = f"loading {row['resident_layers']}/{row['layers']}" if row["state"] == "loading" else row["state"]
    return f"{state}, pinned" if row["pinned"] else state


def show_one(row: dict[str, Any], console: Console) -> None:
    """A line for each thing that there is to say."""
    from lora_server import terminal

    tokens = " ".join(map(str, row["invocation_tokens"] or ()))
    lines = {
        "state": f"{row['state']}, pinned" if row["pinned"] else row["state"],
        "layers": f"{row['resident_layers']} of {row['layers']}" if row["layers"] else "",
        "rank": str(row["lora_rank"] or ""),
        "size": size(row["bytes"]) if row["bytes"] else "",
        "clients": f"{row['holders']:,}" if row["bytes"] else "",
        "version": row["version"],
        "handle": str(row["handle"] or ""),
        "invoked by": row["invocation_text"] or tokens,
        "directory": row["uri"],
    } | {f"shard {one['shard']}": _where(one) for one in row.get("shards", ())}
    console.print(row["name"], style="bold", markup=False)
    terminal.pairs(console, {name: value for name, value in lines.items() if value})
    for warning in row["warnings"]:
        terminal.say(console, warning, "warning")
    if row["error"]:
        terminal.say(console, row["error"], row["state"])


def _where(one: dict[str, Any]) -> str:
    """What a shard has where."""
    device, host, layers = one["device_layers"], one["host_layers"], one["layers"]
    below = "remote" if one["remote"] else "disk"
    places = {"device": device, "host": host, below: layers - max(device, host)}
    return ", ".join(f"{place} {num}/{layers}" for place, num in places.items() if num) or "nothing of it"


# -- replies as plain values


def _rows(server: str) -> list[dict[str, Any]]:
    """What is served, and then what was refused, in the same form."""
    from lora_server.wire.listing import all_pages

    reply = all_pages(lambda request: ask(server, "Adapters", "List", request))
    return [*map(_adapter, reply.adapters), *map(_refused, reply.refused)]


def _shards(server: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """How much of its layers each shard has in its device pool, and in its host pool."""
    from lora_server.wire import lora_server_pb2 as pb

    if row["state"] in ("refused", "draining"):
        return []
    reply = ask(server, "Adapters", "Get", pb.GetAdapterRequest(name=row["name"]))
    return [
        {
            "shard": one.shard,
            "device_layers": one.ready,
            "host_layers": one.host,
            "layers": one.layers,
            "remote": one.remote,
        }
        for one in reply.shards
    ]


def _refused(refusal: pb.Refusal) -> dict[str, Any]:
    from lora_server.wire import lora_server_pb2 as pb

    unserved = pb.Adapter(name=refusal.name, uri=refusal.uri, state="refused", error=refusal.reason)
    return _adapter(unserved) | {"error_code": refusal.code}


def _adapter(message: pb.Adapter) -> dict[str, Any]:
    return {
        "name": message.name,
        "version": message.version,
        "lora_rank": message.lora_rank,
        "bytes": message.bytes,
        "state": message.state,
        "resident_layers": message.resident_layers,
        "layers": message.layers,
        "holders": message.holders,
        "pinned": message.pinned,
        "tenant": None,
        "handle": message.handle,
        "uri": message.uri,
        "invocation_tokens": list(message.invocation.tokens) or None,
        "invocation_text": message.invocation.text or None,
        "warnings": list(message.warnings),
        "error": message.error,
        "error_code": "",
    }
