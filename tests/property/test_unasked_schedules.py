"""Shards load the same adapters unasked, however their messages, loads and evictions interleave: models of shards under
the real decision, in an order that a seed chooses, without threads."""

import random
from collections import deque

import pytest

from lora_server.control.sync.prewarm import Prewarm
from lora_server.control.sync.residency import ResidencyTable
from lora_server.control.sync.sizes import PoolSizes
from lora_server.placement import Layout, Placement
from lora_server.wire import lora_server_pb2 as pb
from tests.support.workload import spec_of

PLACEMENT = Placement(spec_of("mixtral"), Layout.parse("ep2-pp2"))
SHARDS = range(PLACEMENT.layout.num_shards)
HANDLES = range(1, 9)


class ModelShard:
    """A pool of bytes; commands come, and what it says leaves, in order."""

    def __init__(self, shard, capacity, sizes, dice):
        self.shard, self.capacity, self.dice = shard, capacity, dice
        self.sizes = {handle: by_shard[shard] for handle, by_shard in sizes.items()}
        self.commands, self.said = deque(), deque()
        self.wanted = []  # loads of a request, in order, without memory so far
        self.whole, self.coming = set(), {}  # coming: the commands to answer
        self.moved = set()

    @property
    def free(self):
        return self.capacity - sum(self.sizes[handle] for handle in self.whole | set(self.coming))

    def report(self):
        coming = {*self.coming, *self.wanted}
        self.said.append(("moved", [(one, one in self.whole, one in coming) for one in self.moved]))
        self.moved = set()

    def answer(self, handle, kinds):
        for kind in kinds:
            self.report()
            self.said.append((kind, handle))

    def obey(self):
        kind, handle = self.commands.popleft()
        if kind == "drop":
            self.whole.discard(handle)
            self.coming.pop(handle, None)
            self.wanted = [one for one in self.wanted if one != handle]
            return
        if handle in self.coming:
            self.coming[handle].append(kind)
        elif kind == "load" and handle not in self.whole:
            self.wanted.append(handle)
        elif kind == "bring" and handle not in self.whole and self.free >= self.sizes[handle]:
            self.coming[handle] = [kind]
        else:
            self.answer(handle, [kind])
        self.moved.add(handle)

    def start(self):
        """Evict what no request waits for, as far as the first load of one needs it."""
        handle = self.wanted[0]
        while handle not in self.whole and handle not in self.coming and self.free < self.sizes[handle]:
            victims = [one for one in sorted(self.whole | set(self.coming)) if "load" not in self.coming.get(one, ())]
            if not victims:
                return
            self.evict(self.dice.choice(victims))
        del self.wanted[0]
        self.moved.add(handle)
        if handle in self.whole:
            self.answer(handle, ["load"])
        else:
            self.coming.setdefault(handle, []).append("load")

    def evict(self, handle):
        self.moved.add(handle)
        self.whole.discard(handle)
        self.answer(handle, self.coming.pop(handle, []))

    def finish(self):
        handle = self.dice.choice(sorted(self.coming))
        kinds = self.coming.pop(handle)
        self.whole.add(handle)
        self.moved.add(handle)
        self.answer(handle, kinds)


class ModelServer:
    """Model shards, and the controller's side as lora_server/control/sync/shard_sync.py has it."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.sizes = {handle: [self.dice.choice((0, 2, 3, 5, 8)) for _ in SHARDS] for handle in HANDLES}
        self.residency, self.pool_sizes, self.known = ResidencyTable(PLACEMENT), PoolSizes(), set(HANDLES)
        self.prewarm = Prewarm(self.residency, self.pool_sizes)
        self.shards = [ModelShard(one, self.dice.randint(10, 24), self.sizes, self.dice) for one in SHARDS]
        for one in self.shards:
            self.pool_sizes.set_capacity(one.shard, one.capacity)
            for handle in HANDLES:
                self.pool_sizes.set_size(handle, one.shard, self.sizes[handle][one.shard])
                self.residency.opened(handle, one.shard)
        self.prewarm.offer(HANDLES)
        self.decide()

    def decide(self):
        for handle, shards in self.prewarm.decide(lambda handle: handle in self.known):
            for shard in shards:
                self.shards[shard].commands.append(("bring", handle))

    def ask(self, handle):
        for one in self.shards:
            self.prewarm.asked(handle, one.shard)
            one.commands.append(("load", handle))

    def remove(self, handle):
        self.known.discard(handle)
        self.prewarm.forget(handle)
        self.residency.forget(handle)
        self.pool_sizes.forget(handle)
        for one in self.shards:
            one.commands.append(("drop", handle))
        self.decide()

    def hear(self, one):
        kind, what = one.said.popleft()
        if kind == "moved":
            for handle, whole, comes in what:
                if handle in self.known:
                    layers = len(PLACEMENT.layers(one.shard)) if whole else 0
                    self.residency.report(one.shard, pb.Residency(handle=handle, layers=layers, coming=comes))
                    self.prewarm.note(handle, one.shard)
            self.prewarm.heard(one.shard)
        elif what in self.known:
            (self.prewarm.answered if kind == "bring" else self.prewarm.note)(what, one.shard)
        self.decide()

    def play(self, asks, removals):
        """Until nothing moves any more."""
        deeds = [self.ask] * asks + [self.remove] * removals
        for _ in range(3000):
            moves = list(self.moves())
            if deeds and (not moves or self.dice.random() < 0.1):
                deed = deeds.pop(self.dice.randrange(len(deeds)))
                deed(self.dice.choice(sorted(self.known)))
            elif moves:
                self.dice.choice(moves)()
            else:
                return
        pytest.fail("the shards never come to rest")

    def moves(self):
        for one in self.shards:
            if one.commands:
                yield one.obey
            if one.wanted:
                yield one.start
            if one.coming:
                yield one.finish
            if one.said:
                yield lambda one=one: self.hear(one)
            if one.moved:
                yield one.report


def lacking_with_room(server, nowhere):
    """Adapters that shards lack though each of these has room; `nowhere`: also those that no shard has, which are
    offered once, and not again when others made room."""
    found = []
    for handle in server.known:
        lacking = [one for one in server.shards if handle not in one.whole]
        some_have_it = len(lacking) < len(server.shards)
        if lacking and (some_have_it or nowhere) and all(one.free >= one.sizes[handle] for one in lacking):
            found.append(handle)
    return found


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_every_adapter_is_on_all_shards_or_lacks_memory_on_one(first):
    for seed in range(first, first + 100):
        server = ModelServer(seed)
        server.play(asks=0, removals=0)
        assert lacking_with_room(server, nowhere=True) == [], seed
        server.play(asks=6, removals=3)
        assert server.prewarm.is_settled, seed
        assert lacking_with_room(server, nowhere=False) == [], seed
