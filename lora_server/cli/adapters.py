"""Adapters of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, ask, one_line_errors, print_json
from lora_server.cli.rows import adapter_names, adapter_row, all_rows, full_name, more, show_list, show_one
from lora_server.units import size

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Adapters of a running server.")

NewName = Annotated[str, typer.Argument(metavar="NAME", help="Name that requests use.")]
KnownName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=adapter_names, help="Name of an adapter.")]
SourceUrl = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="PEFT directory, as the server sees it, or a URL such as s3://bucket/law."),
]
WithOption = Annotated[str, typer.Option("--with", metavar="TENANT", help="Tenant to share with. (default: all)")]
WaitOption = Annotated[float, typer.Option(help="Longest time (s) for validation and loading on every shard.")]
DrainOption = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which clients that still hold the old version are cut off. (default: never)", min=0.0
    ),
]


@app.command("list")
@one_line_errors()
def list_adapters(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """List adapters, their states, errors and users."""
    rows = all_rows(server)
    if as_json:
        print_json(rows)
        return
    from lora_server import terminal

    show_list(rows, terminal.open_console())


@app.command("show")
@one_line_errors()
def show_adapter(name: KnownName, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show one adapter: state, shards, versions."""
    from lora_server import terminal
    from lora_server.errors import UnknownAdapterError

    rows, full = all_rows(server), full_name(server, name)
    found = [row for row in rows if row["name"] == full]
    if not found:
        raise UnknownAdapterError(f"adapter {name!r}: not registered at {server}; see lora-server adapters list")
    row = found[0] | more(server, found[0])
    if as_json:
        print_json(row)
    else:
        show_one(row, terminal.open_console())


@app.command("add")
@one_line_errors()
def add_adapter(
    name: NewName,
    source: SourceUrl,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: WaitOption = 120.0,
    slo_class: Annotated[
        str | None,
        typer.Option(help="SLO class, of the server's --classes; '' for none. (default: as it is)", metavar="TEXT"),
    ] = None,
) -> None:
    """Validate an adapter, load it on every shard, then serve it."""
    from lora_server.wire import lora_server_pb2 as pb

    request = pb.AddAdapterRequest(name=name, uri=_source(source), wait_seconds=wait, slo_class=slo_class)
    _change(server, "Add", request, as_json)


@app.command("update")
@one_line_errors()
def update_adapter(
    name: KnownName,
    source: SourceUrl,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: WaitOption = 120.0,
    seconds: DrainOption = None,
) -> None:
    """Replace an adapter by another version.

    The new version is loaded beside the old one, then the name switches to it. If it is refused, or not loaded in
    time, nothing changes.
    """
    from lora_server.wire import lora_server_pb2 as pb

    request = pb.UpdateAdapterRequest(name=name, uri=_source(source), wait_seconds=wait, drain_seconds=seconds)
    _change(server, "Update", request, as_json)


@app.command("rollback")
@one_line_errors()
def rollback_adapter(
    name: KnownName,
    to: Annotated[
        str, typer.Option(help="Version from `adapters show`, or its first digits. (default: the one before)")
    ] = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: WaitOption = 120.0,
    seconds: DrainOption = None,
) -> None:
    """Switch a name back to an earlier version."""
    from lora_server.wire import lora_server_pb2 as pb

    request = pb.RollbackAdapterRequest(name=name, version=to, wait_seconds=wait, drain_seconds=seconds)
    _change(server, "Rollback", request, as_json)


@app.command("remove")
@one_line_errors()
def remove_adapter(
    name: KnownName, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False, seconds: DrainOption = None
) -> None:
    """Stop serving an adapter to new requests.

    Its weights are freed when the last request that holds it has ended.
    """
    from lora_server.wire import lora_server_pb2 as pb

    reply = ask(server, "Adapters", "Remove", pb.RemoveAdapterRequest(name=name, drain_seconds=seconds))
    if as_json:
        print_json({"name": name, "holders": reply.holders})
    else:
        typer.echo(f"{name}: removed" + (f"; clients that still use it: {reply.holders}" if reply.holders else ""))


@app.command("pin")
@one_line_errors()
def pin_adapter(
    name: KnownName,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(help="Longest time (s) for loading on every shard.")] = 120.0,
) -> None:
    """Load an adapter on every shard and never evict it.

    A pin is refused if all pinned adapters together do not fit a shard's pool.
    """
    from lora_server.cli.loading import loading
    from lora_server.wire import lora_server_pb2 as pb

    with loading(server, name):
        row = adapter_row(ask(server, "Adapters", "Pin", pb.PinAdapterRequest(name=name, wait_seconds=wait), wait + 10))
    _show_pinned(row, as_json)


@app.command("unpin")
@one_line_errors()
def unpin_adapter(name: KnownName, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Allow an adapter to be evicted again."""
    from lora_server.wire import lora_server_pb2 as pb

    _show_pinned(adapter_row(ask(server, "Adapters", "Unpin", pb.UnpinAdapterRequest(name=name))), as_json)


@app.command("share")
@one_line_errors()
def share(
    name: KnownName, tenant: WithOption = "", server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Let other tenants use an adapter.

    They use it by its full name, TENANT/NAME.
    """
    _share(server, name, tenant, False, as_json)


@app.command("unshare")
@one_line_errors()
def unshare(
    name: KnownName, tenant: WithOption = "", server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Stop sharing an adapter; requests that use it now may finish."""
    _share(server, name, tenant, True, as_json)


# -- requests


def _source(text: str) -> str:
    return text if "://" in text else str(Path(text).absolute())


def _change(server: str, method: str, request: Any, as_json: bool) -> None:
    """Add or change an adapter with a progress bar, then print the version that serves."""
    from lora_server import terminal
    from lora_server.cli.loading import loading

    with loading(server, request.name):
        row = adapter_row(ask(server, "Adapters", method, request, request.wait_seconds + 10))
    if as_json:
        print_json(row)
    else:
        text = f"{row['name']}: rank {row['lora_rank']}, {size(row['bytes'])}, version {row['version'][:12]}"
        terminal.say(terminal.open_console(), text)
    for warning in row["warnings"]:
        terminal.say(terminal.open_console(stderr=True), warning, "warning")


def _share(server: str, name: str, tenant: str, stop: bool, as_json: bool) -> None:
    from lora_server.wire import lora_server_pb2 as pb

    reply = ask(server, "Access", "Share", pb.ShareRequest(name=name, tenant=tenant, stop=stop))
    if as_json:
        print_json({"name": reply.name, "tenants": list(reply.tenants), "all": reply.all})
    else:
        whom = "all" if reply.all else ", ".join(reply.tenants) or "no other tenant"
        typer.echo(f"{reply.name}: shared with {whom}")


# -- output


def _show_pinned(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{row['name']}: {'pinned' if row['pinned'] else 'not pinned any more'}")
