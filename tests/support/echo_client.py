"""The client of a shard that answers with what it was sent, reversed; light, since processes of their own import it."""

import random
import time

from lora_server.transport.base import Link
from lora_server.wire.region import RegionLayout

LAYOUT = RegionLayout(depth=3, request_bytes=8192, response_bytes=4096)
SECONDS = 60.0
SHARD = 7


class Echo:
    """A client of EchoShard; `push` and `check` may be apart by up to depth steps, `step` does both."""

    def __init__(self, link: Link, seed: int) -> None:
        self.link, self.random, self.seq = link, random.Random(seed), 0
        self.sent: dict[int, bytes] = {}

    def push(self, nbytes: int | None = None) -> int:
        self.seq += 1
        nbytes = nbytes or self.random.randint(4, LAYOUT.response_bytes)
        data = nbytes.to_bytes(4, "little") + self.random.randbytes(nbytes - 4)
        self.link.region.request(self.seq)[:nbytes] = data
        self.link.push(self.seq, nbytes)
        self.sent[self.seq] = data
        return self.seq

    def check(self, seq: int) -> None:
        self.link.wait(seq, time.monotonic() + SECONDS)
        data = self.sent.pop(seq)
        assert bytes(self.link.region.response(seq)[: len(data)]) == data[::-1], f"seq {seq}"

    def step(self, nbytes: int | None = None) -> None:
        self.check(self.push(nbytes))
