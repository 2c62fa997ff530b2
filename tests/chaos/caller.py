"""A client that behaves, as a process: `python -m tests.chaos.caller ADDRESS TRANSPORT`.

It decodes: a step of 8 rows every 10 ms. A JSON line per step: what came of it, and how long it took from when it was
due. (Of a prompt's large steps, no more than its share goes on while others send them too.)
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

import torch

from client_connector.client import Client
from client_connector.packing import Activations, HostPacker
from client_connector.remote import RemoteServer
from client_connector.routing import Batch, Run, route_experts
from lora_server import logs
from lora_server.errors import LoraServerError
from lora_server.spec import Site

SITE = Site(0, "gate_up")
SMALL, LARGE, MANY = 8, 128, 1024  # rows; two experts each: 256 entries are a message, and 2048 more than all slots
PERIOD = 10e-3


class Caller:
    """A client that steps at one site with the same rows: their deltas must not change."""

    def __init__(self, client: Client, rows: int, name: str = "tenant") -> None:
        self.client, self.model, self.rows, self.name = client, client.terms.spec, rows, name
        self.hold()
        generator = torch.Generator().manual_seed(rows)
        self.x = torch.randn(rows, self.model.hidden, generator=generator)
        self.experts = torch.rand(rows, self.model.experts, generator=generator).topk(self.model.top_k).indices
        self.owners = torch.tensor(client.placement.first_owners(SITE))
        self.first: list[torch.Tensor] = []

    def hold(self) -> None:
        """Acquire the adapter; to be called again after a session is lost."""
        self.held = self.client.acquire([self.name])
        self.batch = Batch.of([Run.of(self.held[0], 0, self.rows)], decode=True)

    def step(self) -> bool:
        """Whether the deltas are those of the first step."""
        messages = route_experts(self.batch, self.experts, self.owners, self.client.terms.max_step_rows)
        packer, deltas = HostPacker(self.client.terms, SITE, Activations(x=self.x, decode=self.batch.decode)), []
        self.client.start(packer, messages).finish(lambda message, delta: deltas.append((message.shard, delta.clone())))
        found = [delta for _, delta in sorted(deltas, key=lambda one: one[0])]
        self.first = self.first or found
        return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(self.first, found, strict=True))


def main() -> None:
    logs.configure()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    client = Client(RemoteServer(sys.argv[1], sys.argv[2]), timeout_seconds=20)
    caller, due = Caller(client, SMALL), time.monotonic()
    is_good = True  # the session, and what it holds
    while True:
        due = max(due + PERIOD, time.monotonic())  # what was late makes none after it late
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            outcome = "right" if caller.step() else "wrong"
        except LoraServerError as error:
            outcome = error.code
            with contextlib.suppress(LoraServerError):  # then the next step fails, too
                is_good = is_good and not client.recover()
                if not is_good:
                    caller.hold()
                    is_good = True
        except Exception as error:
            outcome = f"untyped {error!r}"
        print(json.dumps({"outcome": outcome, "seconds": time.monotonic() - due}), flush=True)


if __name__ == "__main__":
    main()
