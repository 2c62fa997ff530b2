"""Before a node stops, or a shard is started anew: requests come to an end, and new ones wait."""

from __future__ import annotations

from typing import Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, EXIT_ERROR, ServerOption, ask, run

SLACK_SECONDS = 10.0  # of the call, beyond what it may wait


def drain(
    server: ServerOption = DEFAULT_SERVER,
    seconds: Annotated[float, typer.Option(help="Seconds to wait for requests to end.")] = 60.0,
    shard: Annotated[int | None, typer.Option(help="Start this shard anew, then go on. (default: none)")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Admit requests again.")] = False,
) -> None:
    """Let requests end, and new ones wait, before something stops."""

    def command() -> None:
        from lora_server.wire import lora_server_pb2 as pb

        if undo:
            ask(server, "Server", "Resume", pb.ResumeRequest())
            typer.echo("requests are admitted again")
            return
        request = pb.DrainRequest(seconds=seconds)
        if shard is not None:
            request.shard = shard
        held = ask(server, "Server", "Drain", request, seconds + SLACK_SECONDS).held
        if shard is not None:
            typer.echo(f"shard {shard} was started anew")
        elif held:
            typer.echo(f"not drained within {seconds:g} s: {held} adapters are still in use", err=True)
            raise typer.Exit(EXIT_ERROR)
        else:
            typer.echo("drained: no request runs, and none is admitted (--undo takes it back)")

    run(command)
