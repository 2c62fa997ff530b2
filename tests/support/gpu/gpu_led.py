"""A stage in leader mode: two shards' kernels in one world, and clients that push every step to both.

The oracle is the rule: a follower orders what its leader has settled, of what is ready the step that was settled first.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from lora_server.transport.gpu.layout import LANES, MAX_LINKS, CommandKind, LinkStatus, NoteKind, Refusal, Role
from tests.support.gpu.gpu_cases import Scene
from tests.support.gpu.gpu_clients import WildClient
from tests.support.gpu.gpu_schedules import drive, replay, restarts
from tests.support.gpu.gpu_shard import HANDLES, LINKS, Shard, Waiting, new_pages
from tests.support.gpu.gpu_weights import BODIES, DEPTH, VARIANTS, Body
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
        self.leader.serve["role"], self.leader.serve["followers"] = Role.LEADS, address(self.tables)
        self.leader.serve["number"] = self.chooser.choice([0, 0x7FFFFFFD, 0xFFFFFFFC])  # ages wrap
        self.follower.serve["role"], self.shards = Role.FOLLOWS, (self.leader, self.follower)
        for shard in self.shards:
            shard.serve["row_words"] = ROW_WORDS
        self.logs: tuple[Log, Log] = {}, {}
        self.launches = 0

    def introduce(self) -> None:
        """While neither runs: a table of zeros."""
        numbers = self.world.shared.new("<u8", MAX_LINKS, ROW_WORDS)
        self.tables[self.chooser.randrange(LANES)] = address(numbers)
        self.follower.serve["numbers"] = address(numbers)

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
        """How many steps the follower has ordered, each the first of what was ready; raises AssertionError."""
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
    """Of a shard's notes: client, epoch and seq, kind, what."""
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
        """As many on their way as there are slots, now and then."""
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


def a_follower_serves_in_its_leaders_order(library: ctypes.CDLL) -> None:
    """Whatever came first, and whatever lacked its weights."""
    stage, members, _ = begin(library, 5)
    for turn in range(6):
        handle = stage.begin(1 + turn % 2, turn % len(VARIANTS))
        for member in members:
            member.following.push(BODIES[0], (handle, handle))
        stage.leader.finish(handle)
        stage.turns(20)
        for member in stage.chooser.sample(members, len(members)):
            member.led.push(BODIES[stage.chooser.randrange(2)], (handle, handle))
            stage.do(member.led.answered_to())
        assert not any(member.following.is_answered() for member in members)
        stage.follower.finish(handle)
        stage.do(*(member.following.answered_to() for member in members))
        assert stage.judge() == (turn + 1) * len(members)
        stage.do(*(shard.drop(1 + turn % 2) for shard in stage.shards))


def what_has_no_number_waits_for_its_budget(library: ctypes.CDLL) -> None:
    """Then it is refused, by a code; and the next one is served."""
    stage, (member,), handles = begin(library, 1)
    member.following.push(BODIES[0], handles, budget_us=40_000)
    began = stage.world.now
    stage.turns()
    assert not member.following.is_answered(1)
    stage.world.pass_time(40_000_000)
    stage.do(member.following.answered_to(1))
    assert member.following.code(1) == "step_timeout" and stage.world.now - began >= 40_000_000
    stage.turns(10)
    assert (NoteKind.REFUSED, member.following.link, 1, Refusal.NOT_NUMBERED) in stage.follower.notes
    member.led.seq = 1
    stage.world.pass_time(10**9)
    while stage.world.running(stage.leader.grid):  # what it knows of a client it reads anew when it is launched
        stage.world.run(20)
    stage.world.write(stage.leader.links[member.led.link : member.led.link + 1]["served"], 1)
    stage.do(member.steps(3, handles))


def what_a_leader_refuses_its_followers_serve(library: ctypes.CDLL) -> None:
    stage, (member,), handles = begin(library, 1)
    other = stage.adapter(1)
    stage.do(stage.leader.drop(1))
    stage.do(member.push(BODIES[0], (other, other)))
    stage.do(*(part.answered_to(1) for part in member.parts))
    assert [part.code(1) for part in member.parts] == ["unknown_adapter", ""]
    stage.do(member.steps(4, handles))
    assert stage.judge() == 5


def a_client_is_ahead_at_its_leader(library: ctypes.CDLL) -> None:
    """By as many steps as there are slots, before the follower has answered the first: chunks of a large step."""
    stage, (member,), _ = begin(library, 1)
    handle = stage.begin(1, 1)
    stage.leader.finish(handle)
    for seq in range(1, 2 * DEPTH + 1):
        for part in member.parts[: 1 if seq > DEPTH else 2]:
            part.push(BODIES[0], (handle, handle))
        stage.do(member.led.answered_to(seq))
    stage.turns(30)
    stage.follower.finish(handle)
    for seq in range(1, 2 * DEPTH + 1):
        stage.do(member.following.answered_to(seq))
        if seq <= DEPTH:
            member.following.push(BODIES[0], (handle, handle))
    assert stage.judge() == 2 * DEPTH


def a_row_is_one_clients(library: ctypes.CDLL) -> None:
    """The leader gives a link to another, who pushes as many steps: they are not the older one's, nor the other way."""
    stage, (older, other), handles = begin(library, 2)
    stage.do(older.steps(2, handles))
    older.following.push(BODIES[0], handles)  # to the follower alone
    stage.do(older.led.cut_off())
    newer = other.led
    stage.do(newer.cut_off())
    newer.link = older.led.link
    stage.leader.links_of = [newer.link if i == newer.index else link for i, link in enumerate(stage.leader.links_of)]
    stage.leader.hold(newer.link, handles[0])
    stage.do(newer.join())
    stage.do(other.following.cut_off())
    stage.do(other.following.join())
    other.following.push(BODIES[0], handles)
    stage.turns()
    assert not other.following.is_answered(1), "numbers of another's steps are none of its own"
    for seq in (1, 2, 3):
        newer.push(BODIES[0], handles)
        stage.do(newer.answered_to(seq))
    stage.do(other.following.answered_to(1))
    stage.turns()
    assert not older.following.is_answered(3), "a link that was given to another numbers no step of its"
    stage.do(older.following.cut_off())
    stage.do(older.join())
    stage.do(older.steps(4, handles))


def a_row_is_one_epochs(library: ctypes.CDLL) -> None:
    """A client that joined a follower anew waits until its leader means that epoch."""
    stage, (member,), handles = begin(library, 1)
    stage.do(member.steps(DEPTH, handles))
    stage.do(member.following.cut_off())
    stage.do(member.following.join())
    member.following.push(BODIES[0], handles)
    stage.turns()
    assert not member.following.is_answered(1)
    stage.do(member.led.cut_off())
    stage.do(member.led.join())
    member.led.push(BODIES[0], handles)
    stage.do(*(part.answered_to(1) for part in member.parts))


def numbers_are_of_one_step(library: ctypes.CDLL) -> None:
    """Not of the one that was in its slot before."""
    stage, (member,), handles = begin(library, 1)
    stage.do(member.steps(DEPTH + 1, handles))
    for seq in range(DEPTH + 2, 3 * DEPTH):
        member.following.push(BODIES[0], handles)
        stage.turns(60)
        assert not member.following.is_answered(seq)
        member.led.push(BODIES[0], handles)
        stage.do(*(part.answered_to(seq) for part in member.parts))


def a_follower_that_comes_later_hears_of_all(library: ctypes.CDLL) -> None:
    """Also of clients that were there; and so does one whose leader is another, with a table of its own."""
    stage = Stage(7, library)
    members, handles = join(stage, 3)
    for turn in range(3):
        for shard in stage.shards:
            shard.stopped = True
        stage.do(*(shard.post(CommandKind.STOP) for shard in stage.shards))
        while any(stage.world.running(shard.grid) for shard in stage.shards):
            stage.turns(1)
        stage.tables[:] = 0
        stage.introduce()
        for shard in stage.shards:
            shard.stopped = False
            shard.launch()
        stage.do(*(member.steps(2, handles, turn) for member in members))
    assert stage.judge() == 18


def launches_push_what_has_no_rows(library: ctypes.CDLL) -> None:
    """As long as a pass has some anywhere, and no other link of it has failed."""
    scene = Scene(library)
    (client,), new = scene.clients, scene.world.private.new
    live, failed = new("<i4", 1), new("<u8", 1)
    client.state["live"], client.state["failed"] = address(live), address(failed)

    def empty_step() -> tuple[int, int]:
        client.fill(BODIES[0], (scene.handle,) * 2)
        client.counts[:] = 0
        scene.do(client.launched(BODIES[0]))
        return int(client.state["pushed"]), int(client.state["status"])

    assert empty_step() == (0, LinkStatus.OK), "nobody's rows"
    live[0] = 1
    assert empty_step() == (1, LinkStatus.OK)
    assert scene.pass_of(client, scene.handle).any() and client.state["pushed"] == 2
    failed[0] = 2
    assert not scene.pass_of(client, scene.handle).any() and client.state["pushed"] == 2
    failed[0] = 3
    assert empty_step() == (3, LinkStatus.OK), "a part of the step that failed elsewhere"
    failed[0] = 0
    assert not scene.pass_of(client, scene.handle + 1).any()
    assert (client.state["status"], failed[0]) == (LinkStatus.FAILED, 4), "the other links hear of it"


def play(seed: int, library: ctypes.CDLL) -> dict[str, int]:
    """A seeded schedule: how many steps the follower has ordered. Raises AssertionError; the seed says it again."""
    chooser = random.Random(~seed)
    stage = Stage(seed, library, chooser.sample(range(2 * LANES), LINKS))
    stage.introduce()
    stage.launch()
    handles = stage.adapter(), stage.adapter(1)
    assert len(set(handles)) == 2 and HANDLES > 1
    members = [Member(stage, i) for i in range(chooser.randint(2, 4))]
    others = [restarts(shard, chooser.randrange(3)) for shard in stage.shards]
    drive(stage.world, stage, [member.run(3, handles) for member in members], others, stage.chooser)
    stage.turns(3)
    links = {link: i + 7 for i, link in enumerate(stage.leader.links_of)}
    replay(stage.leader.notes, stage.logs[0], links)
    ordered = stage.judge()
    assert ordered == sum(member.following.answered for member in members)
    return {"steps": ordered, "launches": sum(shard.launches for shard in stage.shards)}


CASES = (
    a_follower_serves_in_its_leaders_order, what_has_no_number_waits_for_its_budget,
    what_a_leader_refuses_its_followers_serve, a_client_is_ahead_at_its_leader, a_row_is_one_clients,
    a_row_is_one_epochs, numbers_are_of_one_step, a_follower_that_comes_later_hears_of_all,
    launches_push_what_has_no_rows,
)  # fmt: skip
