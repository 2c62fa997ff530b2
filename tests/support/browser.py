"""A headless browser, where there is one (`make browser`): its DevTools protocol, over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_server.demo import children
from tests.support.serving import HANG_SECONDS, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: make browser")
CONTRAST = """
const numbers = (color) => color.match(/[0-9.]+/g).map(Number);
function light(color) {
  const [r, g, b] = color.slice(0, 3).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(one, other) {
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
"""  # of two colours: WCAG 2


class Page:
    """A page in a browser of its own. Time passes there as everywhere."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe, self._said, self._calls = pipe, b"", 0
        self._session: dict[str, str] = {}

    def open(self, url: str, size: tuple[int, int], scheme: str) -> None:
        """Open a URL in a window of this size, with the reader's preference for a `scheme`: light or dark."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        wide, high = size
        self._call("Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer["errorText"])

    def until(self, condition: str) -> None:
        """Wait until the page is loaded and a JavaScript expression is true there."""
        expression = f'document.readyState === "complete" && Boolean({condition})'
        until(lambda: self.value(expression), f"the page's {condition}")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, or what it throws as an error."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def elements(self) -> str:
        """Return what the page consists of now, as HTML."""
        return str(self.value("document.documentElement.outerHTML"))

    def picture(self) -> bytes:
        """Return what the page looks like now, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        call = {"id": self._calls, "method": method, "params": params, **self._session}
        self._pipe.sendall(json.dumps(call).encode() + b"\0")
        while (answer := self._next()).get("id") != self._calls:
            pass  # what happens in the page meanwhile
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> Any:
        while b"\0" not in self._said:
            more = self._pipe.recv(1 << 20)
            assert more, "the browser ended"
            self._said += more
        one, _, self._said = self._said.partition(b"\0")
        return json.loads(one)


@contextlib.contextmanager
def opened(
    url: str, directory: Path, *flags: str, size: tuple[int, int] = (1280, 1024), scheme: str = "light"
) -> Iterator[Page]:
    """A page, until the end of the block; the browser's own files are in `directory`."""
    ours, its = socket.socketpair()
    with ours, its:
        ours.settimeout(HANG_SECONDS)
        pipes = f'exec "$@" 3<&{its.fileno()} 4>&{its.fileno()}'  # Chromium reads from 3 and writes to 4
        command = ["bash", "-c", pipes, "bash", str(CHROMIUM), *FLAGS, f"--user-data-dir={directory}", *flags]
        process = children.start(command, pass_fds=[its.fileno()], stderr=subprocess.DEVNULL)
        its.close()
        try:
            page = Page(ours)
            page.open(url, size, scheme)
            yield page
        finally:
            children.stop(process)


def look(url: str, directory: Path, *flags: str, when: str = "true", **how: Any) -> tuple[str, bytes]:
    """Return a page's elements and its picture, when it is loaded and the JavaScript expression `when` is true there.

    `flags` and `how` are those of `opened`.
    """
    with opened(url, directory, *flags, **how) as page:
        page.until(when)
        return page.elements(), page.picture()
