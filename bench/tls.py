"""The cost of encryption to a step over TCP: in the clear and over TLS, by turns in one run.

    python -m bench.tls [--json] [--rounds N]        N of the smallest size; fewer of larger ones

Steps: one process pushes so many bytes, another answers with as many; medians. The floor, by turns with them, is
AES-256-GCM alone, on one core in records of 16 KB: what goes either way is encrypted once and decrypted once.
Records: CPU time of one thread for 16 KB, which other load of the machine changes little.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection as Pipe

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench import harness
from bench.transport import DEADLINE_SECONDS, SIZES, WARM_UP, end_with_parent, spawned
from lora_server.access.tls import shard_certificate
from lora_server.daemon.shard_main import SWITCH_SECONDS
from lora_server.transport.base import Grant, Port
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from lora_server.transport.tls import RECORD_BYTES, Stream, connect
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout

TOGETHER = 4  # records


# -- steps


def _shard(nbytes: int, steps: int, pipe: Pipe) -> None:
    """The other process: a shard's loop, reached in the clear and over TLS."""
    end_with_parent()
    sys.setswitchinterval(SWITCH_SECONDS)
    port = Port(RegionLayout(depth=4, request_bytes=nbytes, response_bytes=nbytes))
    for client in (1, 2):
        port.grant(Grant(client, 1, b"key"))
    certificate = shard_certificate(0)
    listeners = [TcpListener(port, "127.0.0.1"), TcpListener(port, "127.0.0.1", certificate=certificate)]
    pipe.send(([one.address for one in listeners], certificate.der))
    while steps:
        for connection in port.rung():
            if connection.requested() > connection.served:
                port.respond(connection, connection.served + 1, nbytes)
                steps -= 1
        port.wait(0.1)
    pipe.recv()
    for one in listeners:
        one.close()


def step(nbytes: int, rounds: int) -> dict[str, float]:
    """Medians in the clear, over TLS, and of the floor."""
    payload, times_ns, floor = os.urandom(nbytes), (list[int](), list[int](), list[int]()), Floor()
    with spawned(_shard, nbytes, 2 * rounds) as ((clear, encrypted), own):
        links = TcpLink(clear, Hello(1, 1, b"key"), 0), TcpLink(encrypted, Hello(2, 1, b"key"), 0, certificate=own)
        for seq in range(1, rounds + 1):
            for link, times in zip(links, times_ns[:2], strict=True):
                link.region.request(seq)[:nbytes] = payload
                began_ns = time.monotonic_ns()
                link.push(seq, nbytes)
                link.wait(seq, time.monotonic() + DEADLINE_SECONDS)
                times.append(time.monotonic_ns() - began_ns)
            began_ns = time.monotonic_ns()
            for _ in range(2 * nbytes // RECORD_BYTES):
                floor.decrypt(floor.encrypt())
            times_ns[2].append(time.monotonic_ns() - began_ns)
        for link in links:
            link.close()
    clear_us, tls_us, floor_us = (statistics.median(times[int(rounds * WARM_UP) :]) / 1e3 for times in times_ns)
    aes = 4 * nbytes / floor_us / 1e3
    return {"nbytes": nbytes, "clear_us": clear_us, "tls_us": tls_us, "floor_us": floor_us, "aes_gbytes_per_s": aes}


class Floor:
    def __init__(self) -> None:
        self._cipher, self._record, self._nonce = AESGCM(os.urandom(32)), os.urandom(RECORD_BYTES), bytes(12)

    def encrypt(self) -> bytes:
        return self._cipher.encrypt(self._nonce, self._record, None)

    def decrypt(self, encrypted: bytes) -> bytes:
        return self._cipher.decrypt(self._nonce, encrypted, None)


# -- records


def _pair(encrypted: bool) -> tuple[Stream, Stream]:
    """A client's and a shard's end of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        shard = listening.accept()[0]
    for one in (client, shard):
        one.setblocking(False)
    if not encrypted:
        return client, shard
    certificate = shard_certificate(0)
    end = certificate.accept(shard)
    connected = connect(client, certificate.der, lambda _: end.shake_hands() and None)
    while not end.shake_hands():
        pass
    return connected, end


def record(rounds: int) -> dict[str, dict[str, float]]:
    """CPU time to send and to receive a record's bytes."""
    data, memory = memoryview(os.urandom(TOGETHER * RECORD_BYTES)), memoryview(bytearray(TOGETHER * RECORD_BYTES))
    ends, floor = {"clear": _pair(False), "TLS": _pair(True)}, Floor()
    times_ns = {name: (list[float](), list[float]()) for name in (*ends, "AES-GCM")}
    for _ in range(rounds):
        for name, (client, shard) in ends.items():
            began_ns, left = time.thread_time_ns(), data
            while left:
                left = left[client.sendmsg([left]) :]
            sent_ns, left = time.thread_time_ns(), memory
            while left:
                with contextlib.suppress(BlockingIOError):
                    left = left[shard.recv_into(left) :]
            times_ns[name][0].append((sent_ns - began_ns) / TOGETHER)
            times_ns[name][1].append((time.thread_time_ns() - sent_ns) / TOGETHER)
        began_ns = time.thread_time_ns()
        encrypted = floor.encrypt()
        sent_ns = time.thread_time_ns()
        floor.decrypt(encrypted)
        times_ns["AES-GCM"][0].append(sent_ns - began_ns)
        times_ns["AES-GCM"][1].append(time.thread_time_ns() - sent_ns)
    for one in (*ends["clear"], *ends["TLS"]):
        one.close()
    return {
        name: {
            f"{way}_us": statistics.median(times) / 1e3 for way, times in zip(("sent", "received"), both, strict=True)
        }
        for name, both in times_ns.items()
    }


STEPS = (
    "bytes each way {nbytes:,} | clear {clear_us:.1f} | TLS {tls_us:.1f} | ratio {ratio:.2f}x | "
    "floor {floor_us:.1f} | AES-GCM GB/s {aes_gbytes_per_s:.2f}"
)
RECORDS = "{name} | sent {sent_us:.1f} | received {received_us:.1f}"


def main() -> None:
    given = harness.flags(__doc__, rounds=3000)
    sizes = harness.progress(SIZES, "stepping")
    steps = [step(nbytes, max(100, given.rounds * SIZES[0] // nbytes)) for nbytes in sizes]
    records = record(given.rounds)
    lines = [{**row, "ratio": row["tls_us"] / row["clear_us"]} for row in steps]
    found = {"steps": steps, "records": records}
    parts = [{"name": name, **times} for name, times in records.items()]
    steps_table = harness.table("A step over TCP, median us", lines, STEPS)
    harness.show(given, found, steps_table, harness.table("16 KB, CPU us of one thread", parts, RECORDS))


if __name__ == "__main__":
    main()
