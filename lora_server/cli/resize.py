"""Resize: a server goes on in another layout, while it serves."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, ask, ask_status, one_line_errors, print_json
from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.units import count
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

TAKE_OVER_SECONDS = 30.0  # at least, until another controller has taken over from one that died, and answers
SLACK_SECONDS = 10.0  # of the call, beyond what it may wait
POLL_SECONDS = 0.3  # between two calls for the progress
WHAT = {
    "starting": "shards up",
    "loading": "adapters in use loaded",
    "crowded": "what is in use does not fit yet; loaded",
    "moving": "clients moved",
}


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
    before = ask_status(server)
    try:
        reply = _resize(server, layout, seconds)
    except ServerUnavailableError as error:
        generation = _taken_over(server, layout, max(seconds, TAKE_OVER_SECONDS), before, error)
        if as_json:
            print_json({"layout": layout, "generation": generation, "moved": None, "ended": None, "seconds": None})
        else:
            typer.echo(f"serving as {layout}: another controller has taken over; clients that had not moved join again")
        return
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
                if (found := _status(server)) is not None and (now := found.resize).state:
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


def _taken_over(server: str, layout: str, seconds: float, before: pb.StatusReply, error: ServerUnavailableError) -> int:
    """Return the generation in which another controller serves the layout, after the one that was asked died.

    Raises `error` where there is no other, and where that one does not serve the layout.
    """
    deadline = time.monotonic() + seconds
    while (now := _status(server)) is None:
        if time.monotonic() > deadline:
            raise error
        time.sleep(POLL_SECONDS)
    if (now.pid, now.leader_epoch) == (before.pid, before.leader_epoch):
        raise error
    if now.layout == layout.strip().lower() and now.generation > before.generation:
        return int(now.generation)
    raise ServerUnavailableError(
        f"{error}; another controller has taken over, and serves on as {now.layout}: not resized, try again"
    )


def _status(server: str) -> pb.StatusReply | None:
    """Ask for the server's status; None without an answer."""
    try:
        return ask_status(server)
    except LoraServerError:
        return None
