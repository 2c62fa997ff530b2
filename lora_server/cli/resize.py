"""Resize: a server goes on in another layout, while it serves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, ask, one_line_errors, print_json
from lora_server.errors import LoraServerError
from lora_server.units import count
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

SLACK_SECONDS = 10.0  # of the call, beyond what it may wait
POLL_SECONDS = 0.3  # between two calls for the progress
WHAT = {"starting": "shards up", "loading": "adapters in use loaded", "moving": "clients moved"}


@one_line_errors()
def resize(
    layout: Annotated[str, typer.Option(help="epX-ppY: X shards per stage, Y stages.")],
    server: ServerOption = DEFAULT_SERVER,
    seconds: Annotated[
        float, typer.Option(help="Longest time (s) until the new shards are loaded, and then for clients to move.")
    ] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Serve in another layout, without a pause.

    New shards start while the old ones serve, and load the adapters in use; then engines move to them, and the old
    ones stop. Refused, and nothing changes, where adapters do not fit or a node cannot start its shards.
    """

    reply = _resize(server, layout, seconds)
    if as_json:
        print_json({"layout": layout, **fields(reply)})
        return
    late = f"; {count(reply.ended)} clients did not move in time and join again" if reply.ended else ""
    typer.echo(f"serving as {layout} after {reply.seconds:.1f} s; clients moved: {count(reply.moved)}{late}")


def _resize(server: str, layout: str, seconds: float) -> pb.ResizeReply:
    """Ask for it, and show on stderr how far it is until the answer comes."""
    from lora_server import terminal
    from lora_server.wire import lora_server_pb2 as pb

    ended = threading.Event()
    with terminal.progress(transient=True) as progress:
        task = progress.add_task("asking", total=None)

        def show() -> None:
            while not ended.wait(POLL_SECONDS):
                try:
                    now = ask(server, "Server", "Status", pb.StatusRequest()).resize
                except LoraServerError:
                    continue
                if now.state:
                    progress.update(task, description=WHAT[now.state], completed=now.done, total=now.total)

        watching = threading.Thread(target=show, daemon=True)
        watching.start()
        try:
            request = pb.ResizeRequest(layout=layout, seconds=seconds)
            reply: pb.ResizeReply = ask(server, "Server", "Resize", request, 2 * seconds + SLACK_SECONDS)
        finally:
            ended.set()
            watching.join(SLACK_SECONDS)
    return reply
