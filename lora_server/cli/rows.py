"""Adapters as rows of plain values, and how the command prints them."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, SERVER_VARIABLE, ask
from lora_server.errors import LoraServerError
from lora_server.units import size
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from rich.console import Console

    from lora_server.wire import lora_server_pb2 as pb

COMPLETION_SECONDS = 0.7
COLUMNS = ("name", "rank", "size", "state", "clients")


def show_list(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a line per adapter; warnings and errors stand below."""
    from lora_server import terminal

    terminal.table(console, COLUMNS, [_cells(row) for row in rows], left=("name", "state"), wrapped="name")
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
    """Print one adapter, a line per property."""
    from lora_server import terminal

    tokens = " ".join(map(str, row["invocation_tokens"] or ()))
    lines = {
        "state": f"{row['state']}, pinned" if row["pinned"] else row["state"],
        "layers": f"{row['resident_layers']} of {row['layers']}" if row["layers"] else "",
        "rank": str(row["lora_rank"] or ""),
        "size": size(row["bytes"]) if row["bytes"] else "",
        "clients": f"{row['holders']:,}" if row["bytes"] else "",
        "SLO class": row["slo_class"] or "",
        "version": row["version"],
        "handle": str(row["handle"] or ""),
        "invoked by": row["invocation_text"] or tokens,
        "directory": row["uri"],
    } | {f"shard {one['shard']}": _where(one) for one in row.get("shards", ())}
    earlier = [one for one in row.get("versions", ()) if not one["listed"]]
    lines |= {f"before, {number}" if number > 1 else "before": _earlier(one) for number, one in enumerate(earlier, 1)}
    console.print(row["name"], style="bold", markup=False)
    terminal.pairs(console, {name: value for name, value in lines.items() if value})
    for warning in row["warnings"]:
        terminal.say(console, warning, "warning")
    if row["error"]:
        terminal.say(console, row["error"], row["state"])


def _earlier(one: dict[str, Any]) -> str:
    when = datetime.datetime.fromtimestamp(one["added"], datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{one['version'][:12]}, {when}, {one['uri']}"


def _where(one: dict[str, Any]) -> str:
    """Say how many layers a shard has in each tier."""
    device, host, layers = one["device_layers"], one["host_layers"], one["layers"]
    below = "remote" if one["remote"] else "disk"
    places = {"device": device, "host": host, below: layers - max(device, host)}
    return ", ".join(f"{place} {num}/{layers}" for place, num in places.items() if num) or "nothing of it"


# -- replies as plain values


def all_rows(server: str) -> list[dict[str, Any]]:
    """List served adapters, then refused ones, in the same form; `bytes` are of the server's dtype."""
    from lora_server.wire.listing import all_pages

    reply = all_pages(lambda request: ask(server, "Adapters", "List", request))
    found = [*map(adapter_row, reply.adapters), *map(refused_row, reply.refused)]
    return [row | {"dtype": reply.dtype} for row in found]


def full_name(server: str, name: str) -> str:
    """Resolve a name as the server does: a tenant may leave its own prefix out."""
    from lora_server.errors import UnknownAdapterError
    from lora_server.wire import lora_server_pb2 as pb

    try:
        return str(ask(server, "Adapters", "Get", pb.GetAdapterRequest(name=name, registered=True)).name)
    except UnknownAdapterError:  # one that was refused, or drains, is listed all the same
        return name


def more(server: str, row: dict[str, Any]) -> dict[str, Any]:
    """Ask for the layers per shard and tier, and for the versions."""
    from lora_server.wire import lora_server_pb2 as pb

    if row["state"] in ("refused", "draining"):
        return {"shards": [], "versions": []}
    reply = ask(server, "Adapters", "Get", pb.GetAdapterRequest(name=row["name"], registered=True))
    shards = [
        {
            "shard": one.shard,
            "device_layers": one.ready,
            "host_layers": one.host,
            "layers": one.layers,
            "remote": one.remote,
        }
        for one in reply.shards
    ]
    return {"shards": shards, "versions": [fields(one) for one in reply.versions]}


def refused_row(refusal: pb.Refusal) -> dict[str, Any]:
    """Make the row of a refused adapter."""
    from lora_server.wire import lora_server_pb2 as pb

    unserved = pb.Adapter(name=refusal.name, uri=refusal.uri, state="refused", error=refusal.reason)
    return adapter_row(unserved) | {"error_code": refusal.code}


def adapter_row(message: pb.Adapter) -> dict[str, Any]:
    """Make the row of a served adapter."""
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
        "slo_class": message.slo_class or None,
        "tenant": None,
        "handle": message.handle,
        "uri": message.uri,
        "invocation_tokens": list(message.invocation.tokens) or None,
        "invocation_text": message.invocation.text or None,
        "warnings": list(message.warnings),
        "error": message.error,
        "error_code": "",
    }


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of the server that the command line names, refused ones too: they can be shown and removed.

    Without an answer within COMPLETION_SECONDS there are none."""
    from lora_server.wire.listing import all_pages

    server = context.params.get("server") or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    try:
        reply = all_pages(lambda request: ask(server, "Adapters", "List", request, COMPLETION_SECONDS))
    except LoraServerError:
        return []
    names = [*(one.name for one in reply.adapters), *(one.name for one in reply.refused)]
    return [name for name in names if name.startswith(incomplete)]
