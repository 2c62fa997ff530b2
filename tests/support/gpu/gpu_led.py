"""A stage in leader mode: two shards' kernels in one world, and clients that push every step to both.

The oracle is the rule: a follower orders what its leader has settled, of what is ready the step that was settled first.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from kernels_cuda.residency import LANES
from lora_server.device.protocol.codes import MAX_LINKS, KernelRole, NoteKind
from tests.support.gpu.gpu_clients import WildClient
from tests.support.gpu.gpu_schedules import drive, give_tenants, replay, restarts
from tests.support.gpu.gpu_shard import HANDLES, LINKS, Shard, Waiting, new_pages
from tests.support.gpu.gpu_weights import BODIES, DEPTH, Body
from tests.support.gpu.gpu_world import World, address

FOLLOWER = 8  # a GPU
ROW_WORDS = 8
SERVED = NoteKind.ORDERED, 0
Key = tuple[int, int, int]  # client, epoch and seq
Log = dict[Key, bytes]


class Stage:
    """A leader, and a follower with links in another order."""

    pages = new_pages(), new_pages()

    def __init__(self, seed: int, library: ctypes.CDLL, follower_links: Sequence[int] = range(LINKS)) -> None:
        torch.manual_seed(seed)
        self.chooser = random.Random(seed)
        self.world = World(seed, library)
        links = self.chooser.sample(range(3 * LANES), LINKS)
        self.leader = Shard(self.world, self.chooser, 50_000_000, links, pages=self.pages[0])
        self.follower = Shard(self.world, self.chooser, 50_000_000, follower_links, FOLLOWER, self.pages[1])
        self.tables = self.world.private.new("<u8", LANES)
        self.leader.serve["role"], self.leader.serve["followers"] = KernelRole.LEADS, address(self.tables)
        self.leader.serve["number"] = self.chooser.choice([0, 0x7FFFFFFD, 0xFFFFFFFC])  # ages wrap
        self.follower.serve["role"], self.shards = KernelRole.FOLLOWS, (self.leader, self.follower)
        for shard in self.shards:
            shard.serve["row_words"] = ROW_WORDS
        self.logs: tuple[Log, Log] = {}, {}
        self.launches = 0

    def introduce(self) -> None:
        """Give the shards a table of zeros. Neither of them may run."""
        self.numbers = self.world.shared.new("<u8", MAX_LINKS, ROW_WORDS)
        self.tables[self.chooser.randrange(LANES)] = address(self.numbers)
        self.follower.serve["numbers"] = address(self.numbers)

    def launch(self) -> None:
        self.launches = 1
        for shard in self.shards:
            shard.launch()

    def pump(self) -> None:
        for shard in self.shards:
            shard.pump()

    def begin(self, index: int, variant: int = 0) -> int:
        (handle,) = {shard.begin(index, variant) for shard in self.shards}
        return handle

    def adapter(self, index: int = 0) -> int:
        handle = self.begin(index)
        for shard in self.shards:
            shard.finish(handle)
        return handle

    def do(self, *what: Waiting) -> None:
        drive(self.world, self, list(what), [], self.chooser)

    def turns(self, count: int = 300) -> None:
        """Time for what must not happen."""
        for _ in range(count):
            self.world.run(20)
            self.pump()

    def judge(self) -> int:
        """Assert that the follower ordered each time the first ready step; return how many steps it ordered."""
        settled = [
            key for key, kind, what in keys_of(self.leader) if kind == NoteKind.REFUSED or (kind, what) == SERVED
        ]
        numbers, ready, ordered = {key: i for i, key in enumerate(settled)}, set[Key](), 0
        for key, kind, what in keys_of(self.follower):
            if kind in (NoteKind.STARTED, NoteKind.CHANGED):
                ready = {one for one in ready if kind == NoteKind.CHANGED and one[0] != key[0]}
            elif kind == NoteKind.READY:
                assert key in numbers, f"{key} was served before its leader said so"
                ready.add(key)
            elif kind == NoteKind.ORDERED:
                first = min(ready, key=numbers.__getitem__)
                assert key == first, f"{key} went before {first}"
                ready.remove(key)
                ordered += not what
        return ordered


def keys_of(shard: Shard) -> Iterator[tuple[Key, int, int]]:
    """Yield ((client, epoch, seq), kind, what) of each of a shard's notes."""
    clients, epochs = {link: i + 7 for i, link in enumerate(shard.links_of)}, dict[int, int]()
    for kind, link, seq, what in shard.notes:
        if kind == NoteKind.CHANGED:
            epochs[link] = what
        yield (clients.get(link, 0), epochs.get(link, 0), seq), kind, what


class Member:
    def __init__(self, stage: Stage, index: int) -> None:
        self.stage, self.parts = stage, []
        for shard, log in zip(stage.shards, stage.logs, strict=True):
            self.parts.append(WildClient(stage.world, shard, index, log))
        self.led, self.following = self.parts
        self.following.epoch = self.led.epoch

    def join(self) -> Waiting:
        for part in self.stage.chooser.sample(self.parts, 2):
            yield from part.join()

    def push(self, body: Body, handles: tuple[int, ...]) -> Waiting:
        for part in self.stage.chooser.sample(self.parts, 2):
            part.push(body, handles)
            for _ in range(self.stage.chooser.randrange(4)):
                yield

    def steps(self, count: int, handles: tuple[int, ...], first: int = 0) -> Waiting:
        """Push `count` steps, now and then into all slots at once, and check the answers."""
        pushed: list[Body] = []
        for turn in range(count):
            pushed.append(BODIES[(self.led.index + first + turn) % len(BODIES)])
            yield from self.push(pushed[-1], handles)
            if len(pushed) == DEPTH or turn == count - 1 or self.stage.chooser.random() < 0.4:
                seqs = range(self.led.seq - len(pushed) + 1, self.led.seq + 1)
                for part, (seq, body) in itertools.product(self.parts, list(zip(seqs, pushed, strict=True))):
                    yield from part.answered_to(seq)
                    part.look(seq, body, handles, part.shard.ready)
                pushed.clear()

    def run(self, rounds: int, handles: tuple[int, ...]) -> Waiting:
        yield from self.join()
        for turn in range(rounds):
            yield from self.steps(self.stage.chooser.randint(1, 5), handles, turn)
            if self.stage.chooser.random() < 0.3:
                for part in self.stage.chooser.sample(self.parts, 2):
                    yield from part.cut_off()
                yield from self.join()


def begin(library: ctypes.CDLL, members: int, seed: int = 5) -> tuple[Stage, list[Member], tuple[int, int]]:
    stage = Stage(seed, library)
    stage.introduce()
    return stage, *join(stage, members)


def join(stage: Stage, members: int) -> tuple[list[Member], tuple[int, int]]:
    stage.launch()
    found, handle = [Member(stage, i) for i in range(members)], stage.adapter()
    for member in found:
        stage.do(member.join())
    return found, (handle, handle)


def play(seed: int, library: ctypes.CDLL) -> dict[str, int]:
    """A seeded schedule: how many steps the follower has ordered. Raises AssertionError; the seed says it again."""
    chooser = random.Random(~seed)
    stage = Stage(seed, library, chooser.sample(range(2 * LANES), LINKS))
    stage.introduce()
    stage.launch()
    handles = stage.adapter(), stage.adapter(1)
    assert len(set(handles)) == 2 and HANDLES > 1
    members = [Member(stage, i) for i in range(chooser.randint(2, 4))]
    give_tenants((part for member in members for part in member.parts), chooser)
    others = [restarts(shard, chooser.randrange(3)) for shard in stage.shards]
    drive(stage.world, stage, [member.run(3, handles) for member in members], others, stage.chooser)
    stage.turns(3)
    replay(stage.leader.notes, stage.logs[0], {member.led.link: member.led for member in members})
    ordered = stage.judge()
    assert ordered == sum(member.following.answered for member in members)
    return {"steps": ordered, "launches": sum(shard.launches for shard in stage.shards)}
