"""Commands' output: on a real terminal, and kept as files beside their tests, screens/NAME.txt, which
LORA_SERVER_SCREENS=write writes anew; read the difference before you commit it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path


def check_screen(test: str, name: str, shown: str) -> None:
    """`test` is the __file__ of the test; lines are compared as they are, blanks at their ends included."""
    file = Path(test).parent / "screens" / f"{name}.txt"
    if os.environ.get("LORA_SERVER_SCREENS") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown)
    assert shown == file.read_text(), f"{file}; LORA_SERVER_SCREENS=write writes what is shown now"


def on_terminal(module: str, arguments: Sequence[str], stream: str) -> tuple[str, ...]:
    """(stdout, stderr) of `python -m module`, one of them a real terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: theirs}
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, **pipes, env=kept | {"TERM": "xterm-256color"})
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the last writer has gone
        while piece := os.read(ours, 65536):
            seen += piece
    os.close(ours)
    said = [seen if piece is None else piece for piece in process.communicate(timeout=120)]
    assert process.returncode == 0, said
    return tuple(piece.decode().replace("\r\n", "\n") for piece in said)
