"""The `lora-server` command. Heavy imports happen inside commands, so that --help is quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.errors import ConfigError, LoraServerError

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

DEFAULT_SERVER = "127.0.0.1:7400"
EXIT_ERROR, EXIT_USAGE = 1, 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
adapters_app = typer.Typer(no_args_is_help=True, help="Adapters of a running server.")
app.add_typer(adapters_app, name="adapters")

ServerOption = Annotated[str, typer.Option("--server", envvar="LORA_SERVER_ADDRESS", help="The server's HOST:PORT.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]


@app.callback()
def root() -> None:
    """LoRA adapters on their own shards, for engines that stay LoRA-free."""


@app.command()
def serve(
    context: typer.Context,
    base_model: Annotated[str | None, typer.Option(help="Model directory (its config.json), or a preset name.")] = None,
    adapters: Annotated[Path | None, typer.Option(help="Directory whose sub-directories are PEFT adapters.")] = None,
    layout: Annotated[str | None, typer.Option(help="epX-ppY: X shards per stage, Y stages. [ep1-pp1]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda: weights and kernels on GPUs. [cpu]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Weights in memory: float32, bfloat16, float16. [float32; bfloat16 on cuda]")
    ] = None,
    pool_gib: Annotated[
        float | None, typer.Option(help="Device memory for adapters, per shard. [80 % of what is free, shared]")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="gRPC address. [127.0.0.1:7400]")] = None,
    http: Annotated[str | None, typer.Option(help="/livez /readyz /metrics. [127.0.0.1:7401]")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where this node keeps its sockets. [temporary]")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes that form this server. [1]")] = None,
    node_rank: Annotated[int | None, typer.Option(help="This node; 0 runs the controller. [0]")] = None,
    controller: Annotated[str | None, typer.Option(help="Node 0's --listen, for the other nodes.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Address at which other hosts reach this node.")] = None,
    max_step_rows: Annotated[int | None, typer.Option(help="Rows times experts of one message. [256]")] = None,
    slots: Annotated[int | None, typer.Option(help="Messages in flight per client and shard. [4]")] = None,
    coordination: Annotated[str | None, typer.Option(help="independent or leader. [independent]")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per shard. [1]")] = None,
    lease_seconds: Annotated[float | None, typer.Option(help="Silence after which a client is cut off. [10]")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these; flags and env win.")] = None,
) -> None:
    """Run one node of a LoRA server until Ctrl-C or SIGTERM."""

    def run() -> None:
        from lora_server import config as configs
        from lora_server import logs
        from lora_server.daemon.node import serve as serve_node

        logs.configure()
        flags = {key: value for key, value in context.params.items() if value is not None and key != "config"}
        failure = serve_node(configs.load(flags, config))
        if failure:
            raise LoraServerError(failure)

    _run(run)


@adapters_app.command("list")
def list_adapters(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """All adapters, with what the shards hold of them."""

    def run() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        reply = _call(server, "Adapters", "List", pb.ListAdaptersRequest())
        rows = [_adapter(one) for one in reply.adapters]
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
        else:
            _table(rows, ("name", "version", "lora_rank", "bytes", "state", "resident_layers", "holders"), "Adapters")

    _run(run)


@adapters_app.command("show")
def show_adapter(name: str, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Everything about one adapter."""

    def run() -> None:
        from lora_server.errors import UnknownAdapterError
        from lora_server.wire import lora_server_pb2 as pb

        reply = _call(server, "Adapters", "List", pb.ListAdaptersRequest())
        found = [_adapter(one) for one in reply.adapters if one.name == name]
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

    _run(run)


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="Your own model directory. [a small random Mixtral]")] = None,
    adapters: Annotated[Path | None, typer.Option(help="Your own adapters. [16 random ones of mixed ranks]")] = None,
    layout: Annotated[str, typer.Option(help="Layout of the main check.")] = "ep2-pp2",
    as_json: JsonOption = False,
) -> None:
    """A sharded server, two engine processes, 16 adapters; every token checked against PEFT."""

    def run() -> None:
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
    import grpc

    from lora_server.wire import lora_server_pb2_grpc as rpc
    from lora_server.wire.rpc import call

    with grpc.insecure_channel(server) as channel:
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
    }


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        shown = row | {"version": str(row.get("version", ""))[:12]}
        table.add_row(*(str(shown.get(column, "")) for column in columns))
    Console().print(table)


def main() -> None:
    """Console script."""
    app()
