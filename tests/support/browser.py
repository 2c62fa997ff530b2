"""A headless browser, where there is one (`make browser`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.serving import HANG_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: make browser")


def look(url: str, directory: Path, *flags: str, virtual_ms: int = 9000) -> tuple[str, bytes]:
    """What a browser makes of a page: its elements, and its picture. Its own files are in `directory`.

    Timers of the page run for `virtual_ms`, at once; 0: it is looked at when it is loaded.
    """
    picture = directory / "page.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom", *flags]
    command += [f"--virtual-time-budget={virtual_ms}"] * (virtual_ms > 0)
    command += [f"--user-data-dir={directory}", f"--screenshot={picture}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout, picture.read_bytes()
