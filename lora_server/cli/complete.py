"""Shell completion of adapter names; empty if the server does not answer soon."""

from __future__ import annotations

import os

import typer

from lora_server.cli.call import DEFAULT_SERVER, SERVER_VARIABLE, ask
from lora_server.errors import LoraServerError

SECONDS = 0.7


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """List names of the server that the command line names, refused ones too: they can be shown and removed."""
    from lora_server.wire.listing import all_pages

    server = context.params.get("server") or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    try:
        reply = all_pages(lambda request: ask(server, "Adapters", "List", request, SECONDS))
    except LoraServerError:
        return []
    names = [*(one.name for one in reply.adapters), *(one.name for one in reply.refused)]
    return [name for name in names if name.startswith(incomplete)]
