"""Situations of a stage in leader mode that schedules seldom reach; each holds gpu_led's rule, or states its own."""

from __future__ import annotations

import ctypes

import numpy as np

from kernels_cuda.residency import LANES
from lora_server.device.protocol.codes import MAX_LINKS, CommandKind, LinkStatus, NoteKind, Refusal
from tests.support.gpu.gpu_led import Member, Stage, begin, join
from tests.support.gpu.gpu_scene import Scene
from tests.support.gpu.gpu_weights import BODIES, DEPTH, VARIANTS
from tests.support.gpu.gpu_world import address

TRIES = 24  # of what luck decides: which loads were made early, which stores come late


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
    """The client is ahead by all its slots before the follower has answered the first step: chunks of a large step."""
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
    """The leader gives a link to another client, which pushes as many steps: neither client's count for the other."""
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
    """A follower learns of clients that were there before it, also when the leader is a new one with its own table."""
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


def word_of(struct: np.void, name: str) -> int:
    """The address of a field."""
    assert struct.dtype.fields is not None
    return address(struct) + struct.dtype.fields[name][1]


def a_row_changes_hands(library: ctypes.CDLL, seed: int) -> tuple[Stage, Member, Member, tuple[int, int]]:
    """Begin a case: `newer` is about to get the leader's link of `older`, and its row has the numbers of two steps."""
    stage, (older, newer), handles = begin(library, 2, seed)
    stage.do(older.steps(2, handles))
    for part in newer.parts:
        stage.do(part.cut_off())
    stage.do(newer.following.join())
    newer.led.link = older.led.link
    stage.leader.hold(newer.led.link, handles[0])
    return stage, older, newer, handles


def pushed_to_follower(stage: Stage, member: Member, handles: tuple[int, int]) -> None:
    member.following.push(BODIES[0], handles)
    while (NoteKind.TAKEN, member.following.link, member.following.seq, 0) not in stage.follower.notes:
        stage.world.run(1)
        stage.pump()


def a_number_is_of_who_has_its_row(library: ctypes.CDLL) -> None:
    """Not of the client that had it when the follower's poller, before its next look, was kept from going on."""
    for seed in range(TRIES):
        stage, older, newer, handles = a_row_changes_hands(library, seed)
        pushed_to_follower(stage, older, handles)
        stage.world.hold(word_of(stage.follower.serve, "done"))
        stage.do(older.led.cut_off(), newer.led.join())
        for seq in range(1, older.following.seq + 1):
            newer.led.push(BODIES[0], handles)
            stage.do(newer.led.answered_to(seq))
        stage.world.let_go()
        stage.turns(200)
        assert not older.following.is_answered(), "served by the number of another's step"


def a_row_that_is_found_has_no_older_numbers(library: ctypes.CDLL) -> None:
    """Though it was given away between two looks of the follower's poller, of which the second finds it."""
    for seed in range(TRIES):
        stage, older, newer, handles = a_row_changes_hands(library, seed)
        pushed_to_follower(stage, newer, handles)
        group = older.led.link // LANES  # of rows: the poller looks at one in each scan
        stage.world.hold(word_of(stage.follower.serve, "done"), MAX_LINKS // LANES + group - 1)
        stage.do(older.led.cut_off(), newer.led.join())
        stage.world.let_go()
        stage.turns(200)
        assert not newer.following.is_answered(), "served by a number that was there before"


def a_row_is_empty_before_it_is_found(library: ctypes.CDLL) -> None:
    """Whatever of it the leader's poller, which goes on no further, has told the follower."""
    for seed in range(TRIES):
        stage, older, newer, handles = a_row_changes_hands(library, seed)
        stage.do(older.led.cut_off())
        pushed_to_follower(stage, newer, handles)
        joins = newer.led.join()
        next(joins)
        stage.world.hold(word_of(stage.leader.mailbox, "heard"))
        stage.turns(500)
        assert not newer.following.is_answered(), "served by a number that was there before"
        stage.world.let_go()


def a_number_brings_whose_row_it_is(library: ctypes.CDLL) -> None:
    """Also the number of a step that is refused at once, the first after its client joined: no fence comes between."""
    stage, (member,), handles = begin(library, 1)
    member.led.seq = 1
    memory = member.led.memory(BODIES[0], handles, 1, 2**60)
    memory[0] ^= 1
    stage.do(member.led.one(memory))
    row = stage.numbers[member.led.link]
    stage.turns(10)
    assert int(row[2]) >> 32 == 1, "its first step has no number"
    assert stage.world.is_ordered(address(row[2:]), row[:1]), "a number may come before whose row it is"


def launches_push_what_has_no_rows(library: ctypes.CDLL) -> None:
    """A launch without rows pushes if the pass has rows anywhere, and none of its other links has failed."""
    scene = Scene(library)
    (client,), new = scene.clients, scene.world.private.new
    live, failed = new("<i4", 1), new("<u8", 1)
    client.state["live"], client.state["failed"] = address(live), address(failed)

    def empty_step() -> tuple[int, int]:
        client.fill(BODIES[0], (scene.handle,) * 2)
        client.counts[:] = 0
        scene.do(client.launched(BODIES[0]))
        return int(client.state["pushed"]), int(client.state["status"])

    assert empty_step() == (0, LinkStatus.OK), "no adapter's rows"
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


CASES = (
    a_follower_serves_in_its_leaders_order,
    what_has_no_number_waits_for_its_budget,
    what_a_leader_refuses_its_followers_serve,
    a_client_is_ahead_at_its_leader,
    a_row_is_one_clients,
    a_row_is_one_epochs,
    numbers_are_of_one_step,
    a_follower_that_comes_later_hears_of_all,
    a_number_is_of_who_has_its_row,
    a_row_that_is_found_has_no_older_numbers,
    a_row_is_empty_before_it_is_found,
    a_number_brings_whose_row_it_is,
    launches_push_what_has_no_rows,
)
