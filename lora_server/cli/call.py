"""Calls to a running server: common options, deadline, errors as one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.errors import ConfigError, LoraServerError

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

DEFAULT_SERVER = "127.0.0.1:7400"
SERVER_VARIABLE = "LORA_SERVER_ADDRESS"
EXIT_ERROR, EXIT_USAGE = 1, 2

ServerOption = Annotated[
    str,
    typer.Option(
        "--server", envvar=SERVER_VARIABLE, help="The server's --listen, HOST:PORT; with a standby both, A:7400,B:7400."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, all else on stderr.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End a command on a LoraServerError, with one line on stderr and an exit code."""
    try:
        yield
    except LoraServerError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR)


def ask(server: str, service: str, method: str, request: Any, seconds: float = 10.0) -> Any:
    """Return the reply. Raises the server's error, or ServerUnavailableError."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would say is in the error
    from lora_server.wire import lora_server_pb2_grpc as rpc
    from lora_server.wire.rpc import call, open_channel

    with open_channel(server) as channel:
        stub = getattr(rpc, f"{service}Stub")(channel)
        return call(getattr(stub, method), request, server=server, seconds=seconds)


def ask_status(server: str) -> pb.StatusReply:
    """Return the server's status. Raises as `ask` does."""
    from lora_server.wire import lora_server_pb2 as pb

    reply: pb.StatusReply = ask(server, "Server", "Status", pb.StatusRequest())
    return reply


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=2))
