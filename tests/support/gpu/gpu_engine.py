"""An engine process in NVSHMEM's world: python -m tests.support.gpu.gpu_engine SERVER ADAPTER. Its GPU is this CPU.

A line of stdin each: `join`, `go` (steps of every shard), `leave`, `abandon` (a step, and leave), `hurry` (join now or
never). It answers with a line: `joined`, a digest of the answers, `left`, or the error's code and text.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch

from client_connector.remote import RemoteServer
from lora_server import logs
from lora_server.errors import LoraServerError
from lora_server.transport.session import Session
from tests.support.gpu import emulated_world
from tests.support.gpu.gpu_steps import Steps

SECONDS = 60.0
STEPS = 3  # more than there are slots


class Engine:
    def __init__(self, server: str, adapter: str, transport: str) -> None:
        self.server, self.adapter, self.transport = server, adapter, transport
        self.session: Session | None = None
        self.steps = list[Steps]()

    def join(self, seconds: float = SECONDS) -> str:
        self.session = RemoteServer(self.server, self.transport).join(seconds)
        (held,) = self.session.acquire([self.adapter], time.monotonic() + SECONDS)
        shards = range(self.session.terms.layout.num_shards)
        self.steps = [Steps(self.session, held.handle, shard, layer=shard) for shard in shards]
        return "joined"

    def leave(self) -> str:
        self.session.leave()
        return "left"

    def abandon(self) -> str:
        self.steps[0].push()
        return self.leave()

    def hurry(self) -> str:
        return self.join(0.1)

    def go(self) -> str:
        digest = hashlib.sha256()
        for _ in range(STEPS):
            for one in self.steps:
                answer = one.step()
                if isinstance(answer, str):
                    return answer
                digest.update(answer.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()

    def obey(self, line: str) -> str:
        try:
            return getattr(self, line)()
        except LoraServerError as error:
            return f"{error.code}: {error}"


def main() -> None:
    logs.configure()
    emulated_world.use()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    engine = Engine(sys.argv[1], sys.argv[2], "nvshmem")
    for line in sys.stdin:
        print(engine.obey(line.strip()), flush=True)


if __name__ == "__main__":
    main()
