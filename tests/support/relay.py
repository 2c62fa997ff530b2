"""A relay between a client and a server's port: it cuts the client off, and keeps, changes or holds what they say."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading

from lora_server.transport.address import parse

SECONDS = 60.0


class Relay(socketserver.ThreadingTCPServer):
    """Passes connections on to `target` until `cut`, and again from `mend` on. `address` stays the same.

    `heard` is all that either side sent. What `spoils`, "client" or "server", sends it changes. While `flows` is not
    set, it holds half of what the server sends."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.address = parse(target), f"127.0.0.1:{self.server_address[1]}"
        self.lock, self.open, self.is_cut = threading.Lock(), set[socket.socket](), False
        self.heard, self.spoils = bytearray(), ""
        self.flows, self.held = threading.Event(), threading.Event()
        self.flows.set()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def cut(self) -> None:
        with self.lock:
            self.is_cut = True
            for one in self.open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.is_cut = False

    def carry(self, data: bytes, who: str, to: socket.socket) -> None:
        """Pass on what one side sent."""
        self.heard += data
        if who == "server" and not self.flows.is_set():
            half = len(data) // 2
            to.sendall(data[:half])
            self.held.set()
            self.flows.wait(SECONDS)
            data = data[half:]
        to.sendall(data if who != self.spoils else data[:-1] + bytes([data[-1] ^ 1]))

    def __exit__(self, *error: object) -> None:
        self.cut()
        self.shutdown()
        super().__exit__(*error)


class _Passing(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        relay, near = self.server, self.request
        with relay.lock:
            if relay.is_cut:
                return
            relay.open.add(near)
        with contextlib.suppress(OSError), socket.create_connection(relay.target) as far:
            other = {near: far, far: near}
            while True:
                for one in select.select(other, (), ())[0]:
                    if not (data := one.recv(1 << 16)):
                        return
                    relay.carry(data, "client" if one is near else "server", other[one])

    def finish(self) -> None:
        with self.server.lock:
            self.server.open.discard(self.request)
