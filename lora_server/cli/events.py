"""What happened at a running server, and what happens there now."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, ServerOption, ask, one_line_errors
from lora_server.errors import ServerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lora_server.wire.event_stream import EventStream, ReceivedBatch

WAIT_SECONDS = 0.5


@one_line_errors()
def events(
    server: ServerOption = DEFAULT_SERVER,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events until Ctrl-C, instead of those that are kept.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per event.")] = False,
) -> None:
    """Print events of a running server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell in the background had it ignored
    with contextlib.suppress(KeyboardInterrupt):
        for batch in _new(server) if follow else _kept(server):
            _print(batch, as_json)


def _kept(server: str) -> Iterator[ReceivedBatch]:
    """Return the batches that the server keeps, oldest first."""
    from lora_server.wire import lora_server_pb2 as pb
    from lora_server.wire.event_stream import received

    opened = ask(server, "Events", "Open", pb.OpenEventsRequest())
    found: list[ReceivedBatch] = []
    for one in opened.topics:
        request = pb.ReplayEventsRequest(topic=one.topic, since=opened.epoch)
        found += received(one.topic, ask(server, "Events", "Replay", request))
    return iter(sorted(found, key=lambda one: one.batch.ts))


def _new(server: str) -> Iterator[ReceivedBatch]:
    """Yield batches as they come. Where some are lost, or the server is away, say so and go on."""
    from lora_server.wire.event_stream import EventStream

    stream = EventStream(server)
    while True:
        try:
            with stream:
                while True:
                    yield from stream.take(WAIT_SECONDS)
        except ServerUnavailableError as error:
            typer.echo(f"warning: {error}", err=True)
        stream = _opened_again(server)


def _opened_again(server: str) -> EventStream:
    from lora_server.wire.event_stream import EventStream

    while True:
        try:
            return EventStream(server)
        except ServerUnavailableError:
            time.sleep(WAIT_SECONDS)


def _print(received: ReceivedBatch, as_json: bool) -> None:
    from msgspec import to_builtins

    topic, sequence, batch = received
    for event in batch.events:
        fields = to_builtins(event)
        if as_json:
            typer.echo(json.dumps({"topic": topic, "sequence": sequence, "ts": batch.ts, **fields}))
        else:
            at, kind = time.strftime("%H:%M:%S", time.localtime(batch.ts)), fields.pop("type")
            typer.echo(" ".join((at, topic, kind, *(f"{name}={value}" for name, value in fields.items()))))
