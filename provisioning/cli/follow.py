"""`provision watch --serve`: looks at a server for as long as it runs, with its metrics, and with --act resizes it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time

import typer
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from lora_server.errors import ConfigError
from lora_server.placement import Layout
from provisioning.inputs import InputError
from provisioning.watch import measured, scrape
from provisioning.watch.autoscale import Autoscaler, Bounds, Look
from provisioning.watch.planned import Planned

RESIZE_SECONDS = 120.0  # for the new shards, and again for the engines
LOOK_SECONDS = 0.2  # between two looks whether it was told to end while a resize is under way


class LookMetrics:
    """The metrics of the last look, at /metrics of a port."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        text = "GPUs of the LoRA server: `serving`, `needed` now, `peak` of what was needed in a day, `wanted`"
        self._gpus = Gauge("provision_gpus", text, ["what"], registry=self.registry)
        self._immediate = Gauge(
            "provision_immediate_admission", "Share of requests admitted at once", registry=self.registry
        )
        self._margin = Gauge(
            "provision_margin", "GPUs beyond those needed, as a part of these; < 0: too few", registry=self.registry
        )
        self._looks = Counter(
            "provision_looks", "Looks at the server, by how they ended", ["outcome"], registry=self.registry
        )
        self._resizes = Counter("provision_resizes", "Resizes, by how they ended", ["outcome"], registry=self.registry)
        for outcome in ("done", "failed"):
            self._looks.labels(outcome)
            self._resizes.labels(outcome)

    def serve(self, port: int) -> None:
        """Listen; raises InputError."""
        try:
            start_http_server(port, registry=self.registry)
        except OSError as error:
            raise InputError(
                f"--serve {port}: cannot listen there ({error.strerror}); give a port that is free"
            ) from None

    def note(self, look: Look | None) -> None:
        """Show a look; None: the server could not be read, and what was seen last stays."""
        self._looks.labels("failed" if look is None else "done").inc()
        if look is not None:
            for what in ("serving", "needed", "peak", "wanted"):
                self._gpus.labels(what).set(getattr(look, what))
            self._immediate.set(look.immediate)
            self._margin.set(look.margin)

    def note_resize(self, failure: str) -> None:
        """Count a resize."""
        self._resizes.labels("failed" if failure else "done").inc()


def follow(server: str, plan: Planned, bounds: Bounds, port: int, every: float, listen: str) -> None:
    """Look at a server `every` so many seconds until SIGTERM or Ctrl-C, and resize the one of `listen`, unless empty.

    Raises InputError at the start alone.
    """
    ended, exported = threading.Event(), LookMetrics()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def counted(layout: Layout) -> str:
        failure = resized(listen, layout, ended)
        exported.note_resize(failure)
        _say(event="resize", layout=str(layout), failure=failure)
        return failure

    scaler = Autoscaler(plan.candidate, bounds, counted if listen else None)
    last = _read(server)
    built = measured.between([last]).server
    plan.check_model(built)
    plan.check_replicas(built)
    if not built.layout:
        raise InputError(f"--server: {server} does not say its layout (lora_server_build_info): upgrade it")
    exported.serve(port)
    while not ended.wait(every):
        try:
            newest = _read(server)
            earlier, last = last, newest
            look = scaler.look(newest.at, measured.between([earlier, newest]))
        except ConfigError as error:
            exported.note(None)
            _say(event="look", failure=str(error))
            continue
        exported.note(look)
        _say(event="look", serving=look.serving, needed=look.needed, peak=look.peak, wanted=look.wanted)


def resized(address: str, layout: Layout, ended: threading.Event) -> str:
    """Run `lora-server resize` for the server of this --listen; returns why it failed, or ''.

    Once `ended` is set it waits no longer: what the server was asked for goes on there.
    """
    asked = ["resize", "--layout", str(layout), "--server", address, "--seconds", f"{RESIZE_SECONDS:g}", "--json"]
    run = [sys.executable, "-m", "lora_server", *asked]
    deadline = time.monotonic() + 3 * RESIZE_SECONDS
    with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not ended.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = process.communicate(timeout=LOOK_SECONDS)
                return str(errors).strip().rpartition("\n")[2] if process.returncode else ""
        process.kill()
    return "told to end before the answer" if ended.is_set() else f"no answer within {3 * RESIZE_SECONDS:g} s"


def _read(server: str) -> scrape.Scrape:
    return scrape.parsed(scrape.fetched(server), f"--server: {server}")[0]


def _say(**fields: object) -> None:
    typer.echo(json.dumps({name: value for name, value in fields.items() if value != ""}))
