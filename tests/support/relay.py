"""A relay between a client and a server's port, which cuts the client off and lets it through again."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading

from lora_server.address import Address


class Relay(socketserver.ThreadingTCPServer):
    """Passes connections on to `target` until `cut`, and again from `mend` on. `address` stays the same."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.address = Address.parse(target), f"127.0.0.1:{self.server_address[1]}"
        self.lock, self.open, self.is_cut = threading.Lock(), set[socket.socket](), False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def cut(self) -> None:
        with self.lock:
            self.is_cut = True
            for one in self.open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.is_cut = False

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
                    other[one].sendall(data)

    def finish(self) -> None:
        with self.server.lock:
            self.server.open.discard(self.request)
