"""The host's identity: two processes with equal ones can share memory."""

from __future__ import annotations

import socket
from pathlib import Path


def host_identity() -> str:
    """Return the kernel's boot id if there is one (containers of one host share it), else the host name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
