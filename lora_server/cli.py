"""The `lora-server` command. Heavy imports happen inside commands, so that --help is quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server import __version__
from lora_server.config import ServeConfig, load
from lora_server.errors import ConfigError, LoraServerError
from lora_server.flags import flags_of

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

DEFAULT_SERVER = "127.0.0.1:7400"
EXIT_ERROR, EXIT_USAGE = 1, 2

HELP = {"help_option_names": ["-h", "--help"]}  # of all sub-commands too

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)
adapters_app = typer.Typer(no_args_is_help=True, help="Adapters of a running server.")
app.add_typer(adapters_app, name="adapters")

ServerOption = Annotated[str, typer.Option("--server", envvar="LORA_SERVER_ADDRESS", help="The server's HOST:PORT.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lora-server {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it, and exit.")
    ] = False,
) -> None:
    """LoRA adapters on their own shards, for engines that stay LoRA-free."""


@app.command()
@flags_of(ServeConfig)
def serve(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these; flags and env win. (default: none)")
    ] = None,
    **flags: Any,
) -> None:
    """Run one node of a LoRA server until Ctrl-C or SIGTERM."""

    def run() -> None:
        from lora_server import logs
        from lora_server.daemon.node import serve as serve_node

        logs.configure()
        failure = serve_node(load({name: value for name, value in flags.items() if value is not None}, config))
        if failure:
            raise LoraServerError(failure)

    _run(run)


@adapters_app.command("list")
def list_adapters(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """All adapters, with what the shards hold of them."""

    def run() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        rows = _rows(_call(server, "Adapters", "List", pb.ListAdaptersRequest()))
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
            return
        _table(rows, ("name", "version", "lora_rank", "bytes", "state", "resident_layers", "holders"), "Adapters")
        for row in rows:
            for warning in row["warnings"]:
                typer.echo(f"{row['name']}: warning: {warning}")
            if row["error"]:
                typer.echo(f"{row['name']}: {row['state']}: {row['error']}")

    _run(run)


@adapters_app.command("show")
def show_adapter(name: str, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Everything about one adapter."""

    def run() -> None:
        from lora_server.errors import UnknownAdapterError
        from lora_server.wire import lora_server_pb2 as pb

        rows = _rows(_call(server, "Adapters", "List", pb.ListAdaptersRequest()))
        found = [row for row in rows if row["name"] == name]
        if not found:
            raise UnknownAdapterError(f"adapter {name!r}: not registered at {server}; see lora-server adapters list")
        if as_json:
            typer.echo(json.dumps(found[0], indent=2))
        else:
            _table([{"": key, name: value} for key, value in found[0].items()], ("", name), "Adapter")

    _run(run)


@adapters_app.command("add")
def add_adapter(
    name: str,
    uri: str,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(help="Seconds for validation and loading on every shard.")] = 120.0,
) -> None:
    """Validate an adapter, load it on every shard, and serve it under NAME. URI: a path, or file://."""

    def run() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        path = uri if "://" in uri else str(Path(uri).resolve())
        request = pb.AddAdapterRequest(name=name, uri=path, wait_seconds=wait)
        row = _adapter(_call(server, "Adapters", "Add", request, wait + 10))
        if as_json:
            typer.echo(json.dumps(row, indent=2))
        else:
            typer.echo(f"{name}: rank {row['lora_rank']}, {row['bytes']} bytes, version {row['version'][:12]}")
        for warning in row["warnings"]:
            typer.echo(f"warning: {warning}", err=True)

    _run(run)


@adapters_app.command("remove")
def remove_adapter(name: str, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Stop serving NAME at once; its weights go when the last request that holds it has ended."""

    def run() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        reply = _call(server, "Adapters", "Remove", pb.RemoveAdapterRequest(name=name))
        if as_json:
            typer.echo(json.dumps({"name": name, "holders": reply.holders}))
        else:
            typer.echo(f"{name}: removed" + (f"; {reply.holders} clients still use it" if reply.holders else ""))

    _run(run)


@app.command()
def status(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Shards, clients and adapters of a running server."""

    def run() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        reply = _call(server, "Server", "Status", pb.StatusRequest())
        document = _fields(reply)
        if as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        title = f"{reply.model} {reply.layout}: {'ready' if reply.ready else 'not ready'}"
        rows = [row | row.pop("stats", {}) for row in document["shards"]]
        columns = ("shard", "stage", "ep_rank", "state", "node", "pid", "restarts", "steps", "failed", "weight_bytes")
        _table(rows, columns, f"{title}; {reply.clients} clients, {reply.adapters} adapters")
        if reply.reason:
            typer.echo(f"not ready: {reply.reason}")
        for one in reply.refused:
            typer.echo(f"refused: {one.name}: {one.reason}")
        if reply.warned:
            typer.echo(f"{reply.warned} adapters are served with a warning: see lora-server adapters list")

    _run(run)


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Your own model directory (default: a small random Mixtral).")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Your own adapters (default: 16 random ones of mixed ranks).")
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout of the main check.")] = "ep2-pp2",
    as_json: JsonOption = False,
) -> None:
    """A sharded server, two engine processes, 16 adapters; every token checked against PEFT."""

    def run() -> None:
        from lora_server import installed

        installed.require("demo")
        from lora_server.demo.run import run_demo

        if not run_demo(model, adapters, layout, as_json):
            raise typer.Exit(EXIT_ERROR)

    _run(run)


def _run(command: Callable[[], None]) -> None:
    try:
        command()
    except LoraServerError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR)


def _call(server: str, service: str, method: str, request: Any, seconds: float = 10.0) -> Any:
    from lora_server.wire import lora_server_pb2_grpc as rpc
    from lora_server.wire.rpc import call, open_channel

    with open_channel(server) as channel:
        stub = getattr(rpc, f"{service}Stub")(channel)
        return call(getattr(stub, method), request, server=server, seconds=seconds)


def _fields(message: Any) -> dict[str, Any]:
    """A message as plain values; numbers stay numbers, unlike in protobuf's own JSON."""

    def plain(value: Any) -> Any:
        return _fields(value) if hasattr(value, "DESCRIPTOR") else value

    found = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        found[field.name] = [plain(one) for one in value] if field.is_repeated else plain(value)
    return found


def _rows(reply: pb.ListAdaptersReply) -> list[dict[str, Any]]:
    """What is served, and then what was refused, in the same form."""
    return [*map(_adapter, reply.adapters), *map(_refused, reply.refused)]


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
        "holders": message.holders,
        "pinned": False,
        "tenant": None,
        "handle": message.handle,
        "uri": message.uri,
        "invocation_tokens": list(message.invocation.tokens) or None,
        "invocation_text": message.invocation.text or None,
        "warnings": list(message.warnings),
        "error": message.error,
        "error_code": "",
    }


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        shown = row | {"version": str(row.get("version", ""))[:12]}
        table.add_row(*(Text(str(shown.get(column, ""))) for column in columns))
    Console().print(table)


def main() -> None:
    """Console script."""
    app()
