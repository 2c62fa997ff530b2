"""Processes of `bench.events`: one publishes at a rate, others read. Each prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import zmq
from zmq.utils import z85

from lora_server.access.identity import ANYBODY
from lora_server.address import Address
from lora_server.control.events.keys import ReaderKeys
from lora_server.control.events.log import EventLog
from lora_server.control.events.publisher import EventPublisher
from lora_server.control.events.sockets import EventSocket, IpcEvents, TcpEvents
from lora_server.wire.events import ADMISSION, RequestAdmitted, decode

TOPIC = "admission//"


def publish(where: str, rate: float, keys_shown: int) -> None:
    """Say where it publishes, and take readers' keys; then publish at `rate` events/s from one line of stdin to the
    next."""
    log, keys = EventLog(), ReaderKeys()
    socket: EventSocket = IpcEvents(where) if where else TcpEvents(Address("127.0.0.1", 0), keys, log.introduce, False)
    print(json.dumps([socket.endpoint, keys.public.hex()]), flush=True)
    for _ in range(keys_shown):
        keys.admit(bytes.fromhex(sys.stdin.readline()), ANYBODY)
    publisher = EventPublisher(log, socket)
    sys.stdin.readline()
    ending, spent = threading.Event(), [0.0]

    def make() -> None:
        began, made = time.monotonic(), 0
        while not ending.wait(0.002):
            while made < (time.monotonic() - began) * rate:
                log.publish(ADMISSION, "", RequestAdmitted(("an-adapter",), 1, time.time()))
                made += 1
        spent[0] = time.thread_time()

    maker = threading.Thread(target=make)
    before, began = time.process_time(), time.monotonic()
    maker.start()
    sys.stdin.readline()
    ending.set()
    maker.join()
    cpu, wall = time.process_time() - before - spent[0], time.monotonic() - began
    sys.stdin.readline()  # the last heartbeats go out meanwhile
    last = log.sequences()[TOPIC]
    publisher.close()
    print(json.dumps({"share": cpu / wall, "batches": last - log.epoch, "last": last, "epoch": log.epoch}), flush=True)


def read(count: int, stalls: bool) -> None:
    """Read with `count` sockets until stdin ends. The endpoint is the first line, the server's key the second."""
    shown = [zmq.curve_keypair() for _ in range(count)]
    print(json.dumps([z85.decode(public).hex() for public, _ in shown]), flush=True)
    endpoint, server_key = json.loads(sys.stdin.readline())
    context, poller, sockets = zmq.Context(), zmq.Poller(), []
    for public, secret in shown:
        socket = context.socket(zmq.SUB)
        if endpoint.startswith("tcp"):
            socket.set(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret)
        if stalls:
            socket.set(zmq.RCVHWM, 1)
            socket.set(zmq.RCVBUF, 1)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        sockets.append(socket)
    stop, begun = threading.Event(), set()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    delays, last, missing, received = [], {}, 0, 0
    while not stop.is_set():
        if stalls and len(begun) == count:
            stop.wait(0.1)
            continue
        for socket, _ in poller.poll(100):
            _, number, payload = socket.recv_multipart()
            sequence, now = int.from_bytes(number, "big"), time.time()
            events = decode(payload).events
            missing += max(0, sequence - last.get(socket, sequence - bool(events)) - bool(events))
            last[socket] = max(sequence, last.get(socket, 0))
            received += bool(events)
            delays += [now - event.waited for event in events] if socket is sockets[0] else []
            if socket not in begun:
                begun.add(socket)
                if len(begun) == count:
                    print("reading", flush=True)
    context.destroy(linger=0)
    print(json.dumps({"delays": delays, "missing": missing, "received": received, "last": list(last.values())}))
    sys.stdout.flush()
    os._exit(0)  # the thread at stdin


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "publish":
        publish(arguments[0], float(arguments[1]), int(arguments[2]))
    else:
        read(int(arguments[0]), role == "stall")
