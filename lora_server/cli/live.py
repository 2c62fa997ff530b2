"""A running server, looked at again and again."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from lora_server.cli.call import ask_status
from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lora_server.wire import lora_server_pb2 as pb
    from lora_server.wire.event_stream import EventStream

    Show = Callable[[pb.StatusReply, Console], None]

SECONDS = 1.0  # between two refreshes
LEAST_SECONDS = 0.2  # likewise, when events come


class EventPause:
    """The pause between two refreshes: it ends when the server publishes an event, or after SECONDS."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._stream: EventStream | None = None

    def wait(self) -> None:
        """Pause. Without events, of a server that is away or has none, it takes SECONDS."""
        from lora_server.wire.event_stream import EventStream

        until = time.monotonic() + SECONDS
        time.sleep(LEAST_SECONDS)
        try:
            self._stream = self._stream or EventStream(self._server)
            while not self._stream.take(max(0.0, until - time.monotonic())) and time.monotonic() < until:
                pass  # a heartbeat
            while self._stream.take(0.0):
                pass  # the next refresh shows all of these
        except LoraServerError:
            self.close()
            time.sleep(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Stop following the server's events."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def watch(server: str, as_json: bool, show: Show) -> None:
    """`show` the status when an event comes, and every second, until Ctrl-C; an error while the server does not answer.

    A terminal gets a screen that is redrawn; a pipe gets one screen, or one JSON document per line, after the other.
    """
    from rich.live import Live

    from lora_server import terminal

    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell in the background had it ignored
    console = terminal.open_console()
    screen = console.is_terminal and not as_json
    pause = EventPause(server)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pause):
        if not screen:
            while True:
                _print(server, as_json, console, show)
                pause.wait()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_look(server, console, show), refresh=True)
                pause.wait()


def _print(server: str, as_json: bool, console: Console, show: Show) -> None:
    if not as_json:
        console.print(_look(server, console, show))
        return
    try:
        document = fields(ask_status(server))
    except ServerUnavailableError as error:
        document = {"ready": False, "reason": str(error)}
    typer.echo(json.dumps(document))


def _look(server: str, console: Console, show: Show) -> RenderableType:
    from rich.console import Console as RichConsole
    from rich.text import Text

    from lora_server import terminal

    page = io.StringIO()
    inner = RichConsole(
        file=page,
        width=console.width,
        force_terminal=console.is_terminal,
        no_color=console.no_color,
        highlight=False,
        soft_wrap=True,
    )
    terminal.say(inner, f"{server} at {time.strftime('%H:%M:%S')}")
    try:
        show(ask_status(server), inner)
    except ServerUnavailableError as error:
        terminal.say(inner, str(error), "failed")
    return Text.from_ansi(page.getvalue())
