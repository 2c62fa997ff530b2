"""Situations of a shard's kernel that schedules seldom reach: a lost block, late weights, many clients."""

from __future__ import annotations

import copy
import ctypes
import itertools

import numpy as np

from lora_server.device.protocol import layout
from lora_server.device.protocol.codes import NUMBERS, CommandKind, NoteKind
from lora_server.wire import slot
from tests.support.gpu.gpu_clients import WildClient
from tests.support.gpu.gpu_scene import Scene, in_all_slots, in_turn
from tests.support.gpu.gpu_shard import Waiting
from tests.support.gpu.gpu_weights import BODIES, DEPTH
from tests.support.gpu.gpu_world import address

PATIENCE_NS = 2_000_000_000  # step.cuh
WEIGHTS_NS = NUMBERS["WEIGHTS_NS"]


def a_step_is_ordered_in_eight_trips(library: ctypes.CDLL) -> None:
    """The poller takes at most eight trips to memory, as docs/gpu.md counts them, from its first look at the signal to
    the word that starts all blocks."""
    scene = Scene(library)
    (client,), world = scene.clients, scene.world
    scene.shard.serve["tells_all"] = 0
    fields = layout.SERVE.fields
    assert fields is not None
    turn = address(scene.shard.serve) + fields["turn"][1]
    for body in BODIES:
        world.watch(address(client.places.request_signal), turn)
        scene.do(client.step(body, scene.handles))
        assert 0 < world.trips <= 8, world.trips


def a_lost_block_ends_the_kernel(library: ctypes.CDLL) -> None:
    """If a block is lost, all others leave within the patience of a barrier, and report why."""
    scene = Scene(library)
    (client,), world, shard = scene.clients, scene.world, scene.shard
    world.freeze(shard.grid, 1)
    client.fill(BODIES[0], scene.handles)
    client.launch_put(BODIES[0])
    for wait in (1000, PATIENCE_NS // 2, PATIENCE_NS // 2 + 1000):
        assert not shard.arrivals[1]
        world.pass_time(wait)
        world.run(40, times=1000)
    assert shard.arrivals[1] == 1
    assert library.world_alive(shard.grid, 0) == 0, "block 0 goes on"
    assert int(shard.mailbox["left"]) == shard.launches and int(shard.serve["done"]) == 0


def a_block_that_is_lost_is_not_waited_for(library: ctypes.CDLL) -> None:
    """No block waits for a lost one once the host aborts: not even block 0, which puts all parts onto a network."""
    for blocks in range(3):
        scene = Scene(library, clients=0, wild=1, network=True)
        (client,), world, shard = scene.clients, scene.world, scene.shard
        client.push(BODIES[0], scene.handles)
        while int(shard.serve["sent"]) < blocks:
            world.run(1)
        world.freeze(shard.grid, 1)
        world.run(40, times=200)
        shard.mail("abort", 1)
        quanta = 4000
        while library.world_alive(shard.grid, 0) or library.world_alive(shard.grid, 2):
            world.run(40)
            quanta -= 1
            assert quanta, f"lost after {blocks} blocks had sent their parts"


def a_host_stops_everything(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    shard, world = scene.shard, scene.world
    shard.stopped = True
    shard.mail("abort", 1)
    world.run(40, times=2000)
    assert not world.running(shard.grid) and shard.arrivals[1] == 1


def a_host_finds_what_its_kernel_has_left(library: ctypes.CDLL) -> None:
    """The host reads `done` and `left` before the grid ends: by then all earlier writes must be ordered. A turn may end
    after the kernel was told to leave."""
    scene = Scene(library, clients=0, wild=2, idle_ns=2**60)
    shard, world, told, late = scene.shard, scene.world, 0, 0
    for _ in range(6):
        shard.pump()
        first, before = scene.clients[0].seq + 1, int(shard.serve["turn"])
        for client, _ in itertools.product(scene.clients, range(DEPTH)):
            client.push(BODIES[0], scene.handles)
        while int(shard.serve["turn"]) == before:
            world.run(1)
        world.freeze(shard.grid, 1)
        scene.do(shard.post(CommandKind.STOP))
        late += int(shard.mailbox["done"]) < int(shard.serve["turn"])
        world.thaw(shard.grid, 1)
        while int(shard.mailbox["left"]) < shard.launches:
            world.run(1)
            if told != (told := int(shard.mailbox["done"])) == int(shard.serve["turn"]):
                blocks = shard.blocks.view(np.uint8)
                assert world.is_ordered(address(shard.mailed("done")), blocks, read=True), "a turn may still read them"
        assert told == int(shard.serve["turn"]), "all that was ordered was done"
        assert world.is_ordered(address(shard.mailed("left")), shard.links.view(np.uint8)), "links may still change"
        scene.do(*(client.answered_to(seq) for client in scene.clients for seq in (first, client.seq)))
    assert late, "no turn ended after the kernel was told to leave"


def weights_that_come_late_block_nobody_else(library: ctypes.CDLL) -> None:
    """One note asks for them; others are served meanwhile; then the step is."""
    scene = Scene(library, clients=2)
    waiting, other = scene.clients
    shard = scene.shard
    late = shard.begin(1, 1)
    step = waiting.step(BODIES[0], (late, late))

    def bring() -> Waiting:
        for _ in range(3):
            yield from other.step(BODIES[3], scene.handles)
        assert waiting.answered == 0 and other.answered == 3
        shard.finish(late)

    scene.do(step, bring())
    assert waiting.answered == 1
    asked = [note for note in shard.notes if note[0] == NoteKind.PREFETCH]
    assert asked == [(NoteKind.PREFETCH, 0, 1, late)]


def weights_are_seen_with_the_word_that_says_so(library: ctypes.CDLL) -> None:
    """The poller sees weights as soon as their ready word is written, even if nothing else makes it look."""
    scene = Scene(library)
    (client,) = scene.clients

    def bring(handle: int) -> Waiting:
        while (NoteKind.PREFETCH, 0, client.seq, handle) not in scene.shard.notes:
            yield
        for _ in range(scene.chooser.randrange(9)):
            yield
        scene.shard.finish(handle)

    for turn in range(6):
        handle = scene.shard.begin(1 + turn % 2, turn % 3)
        scene.do(client.step(BODIES[0], (handle, handle)), bring(handle))
        scene.do(scene.shard.drop(1 + turn % 2))


def more_clients_than_orders(library: ctypes.CDLL) -> None:
    """Six clients push at once: no order is overwritten before it was computed, and the oldest goes first."""
    scene = Scene(library, clients=0, wild=6)
    scene.shard.finish(other := scene.shard.begin(1, 1))
    scene.do(*(in_turn(client, range(3), scene.handle, other) for client in scene.clients))
    scene.replay()


def orders_wait_for_the_workers(library: ctypes.CDLL) -> None:
    """Two turns ahead, while a block does not go on."""
    scene = Scene(library, clients=0, wild=6)
    serve = scene.shard.serve
    scene.world.freeze(scene.shard.grid, 1)
    for client in scene.clients:
        client.push(BODIES[0], scene.handles)
    for _ in range(300):
        scene.world.run(40)
        assert int(serve["turn"]) <= 2
    assert (int(serve["turn"]), int(serve["done"])) == (2, 0)


def more_clients_than_lanes(library: ctypes.CDLL) -> None:
    """Clients that share a lane get the same shares as others; if one leaves, even the last, the others stay."""
    links = (*range(35), 64, 66, 97)
    scene = Scene(library, clients=0, wild=len(links), links=links, idle_ns=2**60)

    def steps(client: WildClient) -> Waiting:
        goes = client.link in (0, 33, 66, 97)
        yield from in_turn(client, range(1 if goes else 3), *scene.handles)
        if goes:
            yield from client.cut_off()
        if goes and client.link != 97:
            yield from client.join()
            yield from in_turn(client, range(1, 3), *scene.handles)

    scene.do(*map(steps, scene.clients))
    assert [one.answered for one in scene.clients] == [3] * (len(links) - 1) + [1]
    scene.replay()


def clients_of_one_lane_have_shares_of_their_own(library: ctypes.CDLL) -> None:
    """Clients that have had more wait; one that has just joined starts with the least share, and goes first."""
    scene = Scene(library, clients=0, wild=5, links=(5, 37, 69, 101, 6), idle_ns=2**60)

    def comes_anew(client: WildClient) -> Waiting:
        for _ in range(12):
            yield from client.steps([BODIES[0]], scene.handles)
            yield from client.cut_off()
            yield from client.join()

    *stay, comes = scene.clients
    pairs = zip(stay, BODIES[3::-1], strict=True)
    scene.do(*(in_all_slots(one, 14, body, scene.handles) for one, body in pairs), comes_anew(comes))
    scene.replay()


def a_step_that_waits_has_no_part_in_the_shares_of_others(library: ctypes.CDLL) -> None:
    """Whenever the only ready step is picked, the step at hand is another: one that waits for weights, looked at last.
    So each client that comes begins where the one before it is, and has no more than its turn when all push."""
    scene = Scene(library, clients=0, wild=4, idle_ns=2**60)
    *busy, waiting = scene.clients
    late = scene.shard.begin(1, 1)
    waiting.push(BODIES[0], (late, late))

    for client in busy:
        scene.do(in_all_slots(client, 4, BODIES[0], scene.handles))
    scene.do(*(in_all_slots(client, 4, BODIES[0], scene.handles) for client in busy))
    assert not waiting.is_answered()
    scene.shard.finish(late)
    scene.do(waiting.answered_to())
    scene.replay()


def tenants_share_by_weight(library: ctypes.CDLL) -> None:
    """A tenant of three clients has no more than one of a single client, which weighs twice as much; and one that comes
    again begins where the others are."""
    scene = Scene(library, clients=0, wild=4, links=(5, 37, 6, 7), idle_ns=2**60)
    for client, tenant in zip(scene.clients, (0, 1, 1, 1), strict=True):
        client.tenant, client.weight = tenant, (2.0, 1.0)[tenant]
        scene.do(client.join())

    late = scene.shard.begin(1, 1)
    for client in scene.clients:  # all wait for weights, and are ready at once
        client.push(BODIES[3 - client.index], (late, late))
    scene.do(iter(range(500)))
    scene.shard.finish(late)
    scene.do(*(client.answered_to() for client in scene.clients))
    for pushing in (scene.clients[1:], scene.clients):
        scene.do(*(in_all_slots(client, 8, BODIES[client.index], scene.handles) for client in pushing))
    scene.replay()


def a_class_goes_first_within_its_share(library: ctypes.CDLL) -> None:
    """Its decode steps pass others by their deadlines, until its client is AHEAD_ROWS ahead."""
    scene = Scene(library, clients=0, wild=3, idle_ns=2**60)
    scene.clients[0].step_us, scene.clients[1].step_us = 50, 20
    scene.do(*(client.join() for client in scene.clients))
    scene.do(*(in_all_slots(client, 40, BODIES[3], scene.handles) for client in scene.clients))
    scene.replay()


def a_step_waits_for_weights_as_long_as_its_client_says(library: ctypes.CDLL) -> None:
    """Steps of a client share WEIGHTS_NS, unless they say that they wait: then each has nine tenths of its budget."""
    scene = Scene(library, clients=0, wild=1, idle_ns=2**60)
    (client,), world, late = scene.clients, scene.world, scene.shard.begin(1, 1)
    waiting = copy.copy(BODIES[0])
    waiting.flags |= slot.WAITS_FOR_WEIGHTS
    for body, ns in ((BODIES[0], WEIGHTS_NS), (BODIES[0], 0), (waiting, 900_000_000)):
        client.push(body, (late, late), budget_us=1_000_000)
        while ns and (NoteKind.PREFETCH, client.link, client.seq, late) not in scene.shard.notes:
            world.run(40)
            scene.shard.pump()
        world.pass_time(max(0, ns - 10_000_000))
        world.run(40, times=50)
        assert ns == 0 or not client.is_answered(), "it waits for longer"
        world.pass_time(20_000_000)
        scene.do(client.answered_to())
        client.look(client.seq, body, (late, late), scene.shard.ready)
        assert client.code(client.seq) == "adapter_not_loaded"
    scene.replay()


def answers_keep_their_order(library: ctypes.CDLL) -> None:
    """Beyond a network that keeps what one block put for long, and brings what another put at once."""
    scene = Scene(library, clients=0, wild=1, network=True)
    (client,) = scene.clients
    for _ in range(40):
        scene.do(client.steps([BODIES[0]] * DEPTH, scene.handles))
