"""Checks of the ports and directories that a node would use."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_server.address import Address
from lora_server.doctor.machine import Finding, failed, ok, warning
from lora_server.units import size

GIB = 1 << 30
LONGEST_SOCKET = 107 - len("/shard-100.sock")  # longest directory: a Unix socket's path (sun_path) holds 107 bytes


@dataclass(frozen=True)
class NodeResources:
    """Addresses that a node listens on and directories that it writes, each with its flag."""

    listens: Sequence[tuple[str, Address]]
    directories: Sequence[tuple[str, Path]] = ()


def ports(resources: NodeResources) -> Iterator[Finding]:
    """Check that each address can be listened on now."""
    for flag, address in resources.listens:
        try:
            family, *_, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            with socket.create_server(target[:2], family=family):
                yield ok("port", f"{flag} {address} is free")
        except OSError as error:
            owner = listener(address.port)
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            text = f"{flag} {address}: {why}" + (f", {owner} listens there" if owner else "")
            yield failed("port", text, f"end it, or give another {flag}; if it is this server, all is well")


def listener(port: int) -> str:
    """Name the process that listens on a port, as far as this user may see; else return ''."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, rows):
            if words[3] == "0A" and int(words[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    for process in Path("/proc").iterdir():
        if re.fullmatch(r"\d+", process.name) and inodes & _descriptors(process):
            return f"process {process.name} ({_name(process)})"
    return ""


def _descriptors(process: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # gone, or another user's
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(str(entry.readlink()))
    return found


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "gone"


def directories(resources: NodeResources) -> Iterator[Finding]:
    """Check that each directory is writable and has space."""
    for flag, directory in resources.directories:
        there = next((one for one in (directory, *directory.absolute().parents) if one.exists()), Path("/"))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield failed("directory", f"{flag} {directory}: {there} cannot be written to", "chown it, or give another")
            continue
        if flag == "--data-dir" and len(os.fsencode(directory.absolute())) > LONGEST_SOCKET:
            text = f"{flag} {directory}: {len(os.fsencode(directory.absolute()))} bytes long"
            yield failed("directory", text, f"give one of at most {LONGEST_SOCKET}: the name of a Unix socket is short")
            continue
        free = os.statvfs(there).f_bavail * os.statvfs(there).f_frsize
        if free < GIB:
            text = f"{flag} {directory}: {size(free)} free"
            yield warning(
                "directory", text, "free some space, or give another: files of remote adapters are kept there"
            )
        else:
            yield ok("directory", f"{flag} {directory}: {size(free)} free")
