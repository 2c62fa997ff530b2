"""Draining: requests finish and new ones wait, before a node stops or a shard restarts."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, EXIT_ERROR, ServerOption, ask, ask_status, one_line_errors

SLACK_SECONDS = 10.0  # of the call, beyond what it may wait
LOOK_SECONDS = 0.2  # between two tries while the controller is away


@one_line_errors()
def drain(
    server: ServerOption = DEFAULT_SERVER,
    seconds: Annotated[float, typer.Option(help="Longest time (s) for requests to finish.")] = 60.0,
    shard: Annotated[int | None, typer.Option(help="Restart this shard between requests. (default: none)")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Admit requests again.")] = False,
) -> None:
    """Stop admitting requests and wait for running ones.

    Use it before a node stops, or with --shard to restart a shard.
    """
    from lora_server.wire import lora_server_pb2 as pb

    if undo:
        ask(server, "Server", "Resume", pb.ResumeRequest(), seconds + SLACK_SECONDS)
        typer.echo("requests are admitted again")
        return
    if shard is not None:
        ask(server, "Server", "Drain", pb.DrainRequest(seconds=seconds, shard=shard), seconds + SLACK_SECONDS)
        typer.echo(f"shard {shard} was started anew")
    elif held := _held(server, seconds):
        typer.echo(f"not drained within {seconds:g} s: {held} adapters are still in use", err=True)
        raise typer.Exit(EXIT_ERROR)
    else:
        typer.echo("drained: no request runs, and none is admitted (--undo takes it back)")


def _held(server: str, seconds: float) -> int:
    """Return how many adapters are still in use after `seconds`.

    A controller that dies meanwhile is restarted and goes on draining: ask it again for the time that is left.
    """
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    from lora_server.errors import ServerUnavailableError
    from lora_server.wire import lora_server_pb2 as pb

    ask_status(server)  # fail at once if no server listens there
    deadline = time.monotonic() + seconds

    def held() -> int:
        left = max(0.0, deadline - time.monotonic()) if seconds > 0 else seconds
        return int(ask(server, "Server", "Drain", pb.DrainRequest(seconds=left), left + SLACK_SECONDS).held)

    away, late = retry_if_exception_type(ServerUnavailableError), stop_after_delay(seconds + SLACK_SECONDS)
    return Retrying(retry=away, stop=late, wait=wait_fixed(LOOK_SECONDS), reraise=True)(held)
