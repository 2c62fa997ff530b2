"""Sharing adapters between tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, ask, print_json, run
from lora_server.cli.complete import adapter_names

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

KnownName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=adapter_names, help="Name of an adapter.")]
WithOption = Annotated[str, typer.Option("--with", metavar="TENANT", help="Tenant to share with. (default: all)")]


def add_to(app: typer.Typer) -> None:
    """Add `share` and `unshare` to the adapters commands."""
    app.command("share")(share)
    app.command("unshare")(unshare)


def share(
    name: KnownName, tenant: WithOption = "", server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Let other tenants use an adapter.

    They use it by its full name, TENANT/NAME.
    """
    run(lambda: _ask(server, name, tenant, False, as_json))


def unshare(
    name: KnownName, tenant: WithOption = "", server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Stop sharing an adapter; requests that use it now may finish."""
    run(lambda: _ask(server, name, tenant, True, as_json))


def _ask(server: str, name: str, tenant: str, stop: bool, as_json: bool) -> None:
    from lora_server.wire import lora_server_pb2 as pb

    reply = ask(server, "Access", "Share", pb.ShareRequest(name=name, tenant=tenant, stop=stop))
    if as_json:
        print_json(_row(reply))
    else:
        whom = "all" if reply.all else ", ".join(reply.tenants) or "no other tenant"
        typer.echo(f"{reply.name}: shared with {whom}")


def _row(reply: pb.ShareReply) -> dict[str, Any]:
    return {"name": reply.name, "tenants": list(reply.tenants), "all": reply.all}
