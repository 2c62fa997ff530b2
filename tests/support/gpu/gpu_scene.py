"""A shard with one adapter and its clients, for cases."""

from __future__ import annotations

import random

import torch

from tests.support.gpu import gpu_weights as weights
from tests.support.gpu.gpu_clients import GpuClient, WildClient
from tests.support.gpu.gpu_schedules import drive, replay
from tests.support.gpu.gpu_shard import LINKS, Shard, Waiting
from tests.support.gpu.gpu_weights import BODIES, DEPTH, Body
from tests.support.gpu.gpu_world import World

SEED = 11


class Scene:
    """A shard with one adapter, and clients that have joined."""

    def __init__(self, library, clients=1, wild=0, idle_ns=50_000_000, network=False, links=range(LINKS)) -> None:
        torch.manual_seed(SEED)
        self.chooser = random.Random(SEED)
        self.world = World(SEED, library, network)
        self.shard = Shard(self.world, self.chooser, idle_ns, links)
        self.shard.serve["tickets"] = 0x7FFFFFFD  # ages are about to wrap
        self.shard.launch()
        self.log: dict[tuple[int, int, int], bytes] = {}
        self.clients = [GpuClient(self.world, self.shard, i, self.log) for i in range(clients)]
        self.clients += [WildClient(self.world, self.shard, clients + i, self.log) for i in range(wild)]
        self.handle = self.shard.begin(0, 0)
        self.handles = (self.handle,) * 2
        self.shard.finish(self.handle)
        for client in self.clients:
            self.do(client.join())

    def do(self, *what: Waiting) -> None:
        drive(self.world, self.shard, list(what), [], self.chooser)

    def kill(self) -> None:
        """The shard's kernel, for good."""
        self.world.kill(self.shard.grid)
        self.shard.stopped = True

    def replay(self) -> None:
        replay(self.shard.notes, self.log, {client.link: client for client in self.clients})

    def pass_of(self, client: GpuClient, handle: int) -> torch.Tensor:
        """A step of a client, whatever becomes of it: what it added."""
        before = client.fill(BODIES[0], (handle, handle))
        self.do(client.launched(BODIES[0]))
        after = torch.from_numpy(client.y.copy()).view(weights.DTYPE)
        return after.float() - before.float()


def in_turn(client: WildClient, turns: range, *handles: int) -> Waiting:
    for turn in turns:
        yield from client.steps([BODIES[(client.index + turn) % len(BODIES)]], handles)


def in_all_slots(client: WildClient, times: int, body: Body, handles: tuple[int, ...]) -> Waiting:
    """Push a step into all slots at once, and again when all are answered."""
    for _ in range(times):
        yield from client.steps([body] * DEPTH, handles)
