"""A live web page, without a build step or external files; it shows the data of `overview`, which comes by `live`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lora_server.control.controller import Controller
from lora_server.control.events.log import EventLog
from lora_server.control.http.page.live import LiveData
from lora_server.control.reports.overview import overview

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def answers(
    controller: Controller, owner: Callable[[str], str], events: EventLog
) -> dict[str, Callable[[Request], Response]]:
    """Return the handlers of the page's files and data, by path. `owner` returns an adapter's tenant."""

    def data() -> dict[str, Any]:
        return overview(controller, owner)

    live = LiveData(data)
    events.on_taken = live.wake
    return {
        **{path: _file(name, kind) for path, (name, kind) in FILES.items()},
        "/status.json": lambda _: JSONResponse(data(), headers={"Cache-Control": "no-store"}),
        "/status.events": live.answer,
    }


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    content = (files(__package__) / name).read_bytes()
    return lambda _: Response(content, media_type=kind, headers=HEADERS)
