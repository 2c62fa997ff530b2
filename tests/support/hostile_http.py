"""Requests that no client should send."""

import contextlib
import socket
import struct

from tests.support.serving import HANG_SECONDS, heard


def opened(port, payload=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)
    connection.sendall(payload)
    return connection


def noise(rng, most=3000):
    return rng.randbytes(rng.randrange(1, most))


def request(head=b"", path=b"/metrics", method=b"GET"):
    return method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n"


def headers(rng, count):
    return b"".join(b"X-%d: %d\r\n" % (i, rng.randrange(9)) for i in range(count))


HOSTILE = {
    "binary": noise,
    "garbage lines": lambda rng: noise(rng) + b"\r\n\r\n",
    "half a request": lambda rng: request(headers(rng, 5))[: rng.randrange(1, 60)],
    "proper": lambda rng: request(path=rng.choice([b"/livez", b"/readyz", b"/metrics"])),
    "many headers": lambda rng: request(headers(rng, rng.randrange(101, 2000))),
    "long header": lambda rng: request(b"X: " + b"y" * 100_000 + b"\r\n"),
    "binary header": lambda rng: request(b"Accept: " + noise(rng, 9) + b"\r\n"),
    "accept": lambda rng: request(b"Accept: text/plain;version=%s;=\r\n" % rng.choice([b"x", b"1..2", b"\xff"])),
    "bad header": lambda rng: request(rng.choice([b"no colon\r\n", b" : x\r\n", b"\0: x\r\n", b"a b: c\r\n"])),
    "content length": lambda rng: request(
        b"Content-Length: %s\r\n" % rng.choice([b"-1", b"1e9", b"9" * 40, b"5\r\nContent-Length: 6", b"99999"])
    ),
    "bad chunks": lambda rng: request(b"Transfer-Encoding: chunked\r\n", method=b"POST") + noise(rng, 99),
    "bad coding": lambda rng: request(b"Transfer-Encoding: %s\r\n" % rng.choice([b"gzip", b"\xff", b"identity"])),
    "body": lambda rng: request(b"Content-Length: 200000\r\n", method=b"POST") + rng.randbytes(200_000),
    "pipelined": lambda rng: request(path=rng.choice([b"/livez", b"/readyz"])) * rng.randrange(2, 50),
    "pipelined garbage": lambda rng: request() * rng.randrange(1, 5) + noise(rng),
    "huge URL": lambda rng: request(path=b"/" + b"u" * rng.choice([2000, 15_000, 100_000])),
    "odd target": lambda rng: request(path=rng.choice([b"*", b"http://x/livez", b"x:1", b"/%zz?%", b"/\xff", b""])),
    "unknown method": lambda rng: request(method=rng.choice([b"BREW", b"CONNECT", b"OPTIONS", b"get", b"\x01"])),
    "HTTP/2 preface": lambda rng: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise(rng),
    "upgrade": lambda rng: request(b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "other version": lambda rng: b"GET /livez HTTP/%s\r\n\r\n" % rng.choice([b"1.0", b"0.9", b"3", b"1.1.1", b"x"]),
}


def attack(port, payload, manner):
    """Send, then read to the end, close without reading, or reset."""
    with opened(port) as connection, contextlib.suppress(ConnectionError):
        if manner == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(payload)
        if manner == "read":
            connection.shutdown(socket.SHUT_WR)
            heard(connection)
