"""One-way push latency of the transports, beside a pull, and a C memcpy + flag in the same run.

    python -m bench.transport [--json] [--rounds N]

One process pushes, another takes and answers with the time (CLOCK_MONOTONIC, one host) at which it saw the push; one
way is that minus the time before the payload was copied. A pull sends a header, and the payload when the other side has
asked for it: a round trip more. Each round has one of each. The floor is the same game in C, compiled on the spot where
there is a compiler. Medians; the rounds of all paths and sizes follow each other in one run.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import shutil
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from bench import harness
from lora_server.transport.base import Grant, Link, Port
from lora_server.transport.shm import ShmLink, create_memory
from lora_server.transport.shm_listener import ShmListener
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import HEADER_BYTES

SIZES = (16 << 10, 256 << 10, 4 << 20)
HELLO = Hello(1, 1, b"key")
DEADLINE_SECONDS = 60.0
WARM_UP = 0.1
SPAWN = multiprocessing.get_context("spawn")
STAMP = struct.Struct("<Q")


def _median_us(times_ns: list[int]) -> float:
    return statistics.median(times_ns[int(len(times_ns) * WARM_UP) :]) / 1e3


# -- our transports


def _shard(transport: str, nbytes: int, rounds: int, pipe: Pipe) -> None:
    """The other process: a shard's receive loop that answers with when it saw the push."""
    end_with_parent()
    port = Port(RegionLayout(depth=4, request_bytes=nbytes, response_bytes=4096))
    port.grant(Grant(HELLO.client, HELLO.epoch, HELLO.key))
    with tempfile.TemporaryDirectory() as directory:
        shm = transport == "shm"
        listener = ShmListener(port, Path(directory) / "s") if shm else TcpListener(port, "127.0.0.1")
        pipe.send(listener.address)

        for _ in range(rounds):
            while not (rung := port.rung()):
                port.wait(0.1)
            seen_ns = time.monotonic_ns()
            connection = rung[0]  # of the only client; its ring and its signal may both have named it
            seq = connection.served + 1
            STAMP.pack_into(connection.region.response(seq), 0, seen_ns)
            port.respond(connection, seq, STAMP.size)
        pipe.recv()
        listener.close()


@contextlib.contextmanager
def spawned(shard: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run `shard(*arguments, pipe)` in a process of its own until the block ends; gives what it sends first."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=shard, args=(*arguments, theirs))
    process.start()
    yield ours.recv()
    ours.send("done")
    process.join()


def end_with_parent() -> None:
    """Exit this process with its parent. A process of SPAWN would otherwise poll for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def one_way_us(transport: str, nbytes: int, rounds: int) -> tuple[float, float]:
    """Measure pushes and pulls by turns. Returns the median of each: from before its first byte to when the shard's
    loop sees the payload."""
    pushed_ns, pulled_ns, payload = list[int](), list[int](), memoryview(os.urandom(nbytes))
    with spawned(_shard, transport, nbytes, 3 * rounds) as address:
        link: Link = ShmLink(address, HELLO, 0) if transport == "shm" else TcpLink(address, HELLO, 0)
        for seq in range(1, 3 * rounds, 3):
            began_ns = time.monotonic_ns()
            pushed_ns.append(_seen_ns(link, seq, payload) - began_ns)
            began_ns = time.monotonic_ns()
            _seen_ns(link, seq + 1, payload[:HEADER_BYTES])  # its answer asks for the rest
            pulled_ns.append(_seen_ns(link, seq + 2, payload) - began_ns)
        link.close()
    return _median_us(pushed_ns), _median_us(pulled_ns)


def _seen_ns(link: Link, seq: int, payload: memoryview) -> int:
    """Copy, push, and wait to be told when it was seen."""
    link.region.request(seq)[: len(payload)] = payload
    link.push(seq, len(payload))
    link.wait(seq, time.monotonic() + DEADLINE_SECONDS)
    return int(STAMP.unpack_from(link.region.response(seq))[0])


# -- the floor


class _Floor:
    """push.c over a shared memory: two flags, two time stamps' worth of answer, one payload slot."""

    def __init__(self, library: str, memory: memoryview, nbytes: int) -> None:
        code: Any = ctypes.CDLL(library)
        pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
        code.push.argtypes, code.push.restype = (pointer, pointer, u64, pointer, u64), u64
        code.take.argtypes, code.take.restype = (pointer, u64), u64
        self.push, self.take = code.push, code.take
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.request, self.response, self.stamp, self.slot = base, base + 128, base + 256, base + 4096
        self.memory, self.nbytes = memory, nbytes


def _floor_partner(library: str, path: str, nbytes: int, rounds: int) -> None:
    end_with_parent()
    with open(path, "r+b") as file:  # noqa: PTH123
        floor = _Floor(library, memoryview(mmap.mmap(file.fileno(), 4096 + nbytes)), nbytes)
    for seq in range(1, rounds + 1):
        stamp = STAMP.pack(floor.take(floor.request, seq))
        floor.push(floor.stamp, stamp, len(stamp), floor.response, seq)


def floor_us(library: str, nbytes: int, rounds: int) -> float:
    """Median of memcpy + release flag + acquire poll."""
    fd, mapping = create_memory("bench", 4096 + nbytes)
    memory = mapping.view
    floor = _Floor(library, memory, nbytes)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    process = SPAWN.Process(target=_floor_partner, args=(library, path, nbytes, rounds))
    process.start()
    payload = ctypes.create_string_buffer(os.urandom(nbytes), nbytes)
    times_ns = []
    for seq in range(1, rounds + 1):
        began_ns = floor.push(floor.slot, payload, nbytes, floor.request, seq)
        floor.take(floor.response, seq)
        times_ns.append(STAMP.unpack_from(memory, 256)[0] - began_ns)
    process.join()
    os.close(fd)
    return _median_us(times_ns)


def compile_floor(directory: str) -> str | None:
    """push.c as a shared library; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = f"{directory}/push.so"
    source = str(Path(__file__).with_name("push.c"))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        library = compile_floor(directory)
        for nbytes in harness.progress(SIZES, "pushing"):
            row: dict[str, Any] = {"nbytes": nbytes}
            if library is not None:
                row["c_us"] = floor_us(library, nbytes, rounds)
            for transport in ("shm", "tcp"):
                push_us, pull_us = one_way_us(transport, nbytes, rounds)
                row |= {f"{transport}_us": push_us, f"{transport}_pull": pull_us / push_us}
                if library is not None:
                    row[f"{transport}_ratio"] = row[f"{transport}_us"] / row["c_us"]
            rows.append(row)
    return rows


COLUMNS = (
    "bytes {nbytes:,} | C {c_us:.2f} | shm {shm_us:.1f} ({shm_ratio:.1f}x) | pull {shm_pull:.2f}x | "
    "tcp {tcp_us:.1f} ({tcp_ratio:.1f}x) | pull {tcp_pull:.2f}x"
)


def main() -> None:
    given = harness.flags(__doc__, rounds=2000)
    rows = measure(given.rounds)
    title = "One-way push, median us (ratio to C memcpy + flag); a pull / that"
    harness.show(given, rows, harness.table(title, rows, COLUMNS))


if __name__ == "__main__":
    main()
