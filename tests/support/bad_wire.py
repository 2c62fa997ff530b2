"""A wire that delays and loses frames: `python -m tests.support.bad_wire END END LOSS DELAY_MS`.

Its ends are two TAP devices, which may be moved to other namespaces once it has said `up`. There is no netem here.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES, FRAMES = 65536, 4096  # frames on their way, both ways together; more are lost


def tap(name: str) -> int:
    """Make a TAP device; returns its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def main() -> None:
    ends, loss, delay = [tap(name) for name in sys.argv[1:3]], float(sys.argv[3]), float(sys.argv[4]) / 1e3
    chance = random.Random(7)
    other = dict(zip(ends, reversed(ends), strict=True))
    on_way: deque[tuple[float, int, bytes]] = deque()  # (due, to, frame): the delay is one, so they are in order
    print("up", flush=True)
    while True:
        due = max(0.0, on_way[0][0] - time.monotonic()) if on_way else None
        ready, _, _ = select.select(ends, [], [], due)
        for end in ready:
            try:
                frame = os.read(end, FRAME_BYTES)
            except BlockingIOError:
                continue
            if chance.random() >= loss and len(on_way) < FRAMES:
                on_way.append((time.monotonic() + delay, other[end], frame))
        while on_way and on_way[0][0] <= time.monotonic():
            _, end, frame = on_way.popleft()
            try:
                os.write(end, frame)
            except OSError:  # that end is down
                continue


if __name__ == "__main__":
    main()
