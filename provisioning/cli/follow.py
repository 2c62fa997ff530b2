"""`provision watch --serve`: looks at a server for as long as it runs, and with --act resizes it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import typer

from lora_server.placement import Layout
from provisioning.inputs import InputError
from provisioning.watch import measured, scrape
from provisioning.watch.autoscale import Autoscaler, Bounds
from provisioning.watch.exported import Exported
from provisioning.watch.planned import Planned

RESIZE_SECONDS = 120.0  # for the new shards, and again for the engines


def follow(
    server: str, plan: Planned, bounds: Bounds, port: int, every: float, resize: Callable[[Layout], str] | None
) -> None:
    """Look at a server `every` so many seconds until SIGTERM or Ctrl-C; raises InputError at the start alone."""
    ended, exported = threading.Event(), Exported()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def counted(layout: Layout) -> str:
        assert resize is not None
        failure = resize(layout)
        exported.note_resize(failure)
        _say(event="resize", layout=str(layout), failure=failure)
        return failure

    scaler = Autoscaler(plan.candidate, bounds, None if resize is None else counted)
    last = _read(server)
    built = measured.between([last])
    plan.check_model(built.model, built.geometry)
    if not built.layout:
        raise InputError(f"--server: {server} does not say its layout (lora_server_build_info): upgrade it")
    exported.serve(port)
    while not ended.wait(every):
        try:
            newest = _read(server)
        except InputError as error:
            exported.note(None)
            _say(event="look", failure=str(error))
            continue
        look = scaler.look(newest.at, measured.between([last, newest]))
        last = newest
        exported.note(look)
        _say(event="look", serving=look.serving, needed=look.needed, peak=look.peak, wanted=look.wanted)


def command(address: str) -> Callable[[Layout], str]:
    """Return a function that runs `lora-server resize` for the server of this --listen, and returns why it failed."""

    def resize(layout: Layout) -> str:
        asked = ["resize", "--layout", str(layout), "--server", address, "--seconds", f"{RESIZE_SECONDS:g}", "--json"]
        run = [sys.executable, "-m", "lora_server", *asked]
        try:
            done = subprocess.run(run, capture_output=True, text=True, timeout=3 * RESIZE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer within {3 * RESIZE_SECONDS:g} s"
        return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""

    return resize


def _read(server: str) -> scrape.Scrape:
    return scrape.parsed(scrape.fetched(server), f"--server: {server}")[0]


def _say(**fields: object) -> None:
    typer.echo(json.dumps({name: value for name, value in fields.items() if value != ""}))
