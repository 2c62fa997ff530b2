"""What a schedule seldom meets: nobody answers, a pass fails, a block is lost, weights come late."""

from __future__ import annotations

import ctypes
import math
import random
import struct

import numpy as np
import torch

from lora_server.timings import Timings
from lora_server.transport.gpu.layout import LinkStatus, NoteKind, Refusal
from lora_server.wire import slot
from tests.support.gpu import gpu_weights as weights
from tests.support.gpu.gpu_clients import BUDGET_NS, GpuClient, WildClient
from tests.support.gpu.gpu_lookups import many_segments_are_looked_up_together
from tests.support.gpu.gpu_schedules import drive, replay
from tests.support.gpu.gpu_shard import LINKS, Shard, Waiting
from tests.support.gpu.gpu_weights import BODIES, BODIES_IN_CODES, DEPTH, Body
from tests.support.gpu.gpu_world import World, address

SEED = 11
PATIENCE_NS = 2_000_000_000  # step.cuh


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
        replay(self.shard.notes, self.log, {client.link: client.id for client in self.clients})

    def pass_of(self, client: GpuClient, handle: int) -> torch.Tensor:
        """A step of a client, whatever becomes of it: what it added."""
        before = client.fill(BODIES[0], (handle, handle))
        self.do(client.launched(BODIES[0]))
        after = torch.from_numpy(client.y.copy()).view(weights.DTYPE)
        return after.float() - before.float()


def in_turn(client: WildClient, turns: range, *handles: int) -> Waiting:
    for turn in turns:
        yield from client.steps([BODIES[(client.index + turn) % len(BODIES)]], handles)


def nobody_answers(library: ctypes.CDLL) -> None:
    """The wait ends at its budget; what follows in the pass sends nothing."""
    scene = Scene(library)
    (client,), world = scene.clients, scene.world
    scene.kill()
    began = world.now
    client.state["budget_ns"] = 30_000
    assert not scene.pass_of(client, scene.handle).any()
    assert client.state["status"] == LinkStatus.TIMEOUT and 30_000 <= world.now - began < 300_000
    word = int(client.places.request_signal[0])
    assert slot.signalled_seq(word, client.epoch) == 1
    began = world.now
    assert not scene.pass_of(client, scene.handle).any()
    assert client.state["status"] == LinkStatus.TIMEOUT and world.now - began < 20_000
    assert int(client.places.request_signal[0]) == word, "a broken link sends nothing"


def a_watchdog_ends_a_wait(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    (client,) = scene.clients
    scene.kill()

    def watchdog() -> Waiting:
        for _ in range(100):
            yield
        client.abort[0] = 1

    client.fill(BODIES[0], scene.handles)
    scene.do(client.launched(BODIES[0]), watchdog())
    assert client.state["status"] == LinkStatus.ABORTED and scene.world.now < BUDGET_NS


def a_pass_that_fails_while_a_put_looks_is_sent_whole_or_not_at_all(library: ctypes.CDLL) -> None:
    """Whenever the word of another link's failure comes; and the next step is served."""
    found = set()
    for turns in range(0, 240, 4):
        scene = Scene(library)
        (client,), world, body = scene.clients, scene.world, BODIES[0]
        failed = world.private.new("<u8", 1)
        client.state["failed"] = address(failed)
        scene.do(client.step(body, scene.handles))
        client.fill(body, scene.handles)
        client.record(2, client.memory(body, scene.handles, 2, BUDGET_NS // 1000))
        put = client.launch_put(body)
        world.run(turns)
        failed[0] = 1
        scene.do(client.ended(put))
        sent = int(client.state["pushed"]) == 2
        assert (slot.signalled_seq(int(client.places.request_signal[0]), client.epoch) == 2) == sent
        found.add(sent)
        failed[0], client.seq = 0, 1 + sent
        if sent:
            scene.do(client.ended(client.launch("link_wait")))
            client.look(2, body, scene.handles, scene.shard.ready)
        scene.do(client.step(body, scene.handles))
    assert found == {False, True}


def a_refused_step_voids_its_pass(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    (client,) = scene.clients
    assert not scene.pass_of(client, scene.handle + 1).any()
    assert client.state["status"] == LinkStatus.FAILED
    assert not scene.pass_of(client, scene.handle).any()
    assert (client.state["status"], client.state["pushed"]) == (LinkStatus.FAILED, 1), "the pass goes on without"
    client.state["status"] = LinkStatus.OK
    assert scene.pass_of(client, scene.handle).any()
    assert (client.state["status"], client.state["pushed"]) == (LinkStatus.OK, 2)


def a_lost_block_ends_the_kernel(library: ctypes.CDLL) -> None:
    """All others leave within the patience of a barrier, and say why."""
    scene = Scene(library)
    (client,), world, shard = scene.clients, scene.world, scene.shard
    world.freeze(shard.grid, 1)
    client.fill(BODIES[0], scene.handles)
    client.launch_put(BODIES[0])
    for wait in (1000, PATIENCE_NS // 2, PATIENCE_NS // 2 + 1000):
        assert not shard.arrivals[1]
        world.pass_time(wait)
        for _ in range(1000):
            world.run(40)
    assert shard.arrivals[1] == 1
    assert library.world_alive(shard.grid, 0) == 0, "block 0 goes on"
    assert int(shard.mailbox["left"]) == shard.launches and int(shard.serve["done"]) == 0


def a_host_stops_everything(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    shard, world = scene.shard, scene.world
    shard.stopped = True
    shard.mail("abort", 1)
    for _ in range(2000):
        world.run(40)
    assert not world.running(shard.grid) and shard.arrivals[1] == 1


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


def a_step_names_what_its_client_holds_alone(library: ctypes.CDLL) -> None:
    """Another is refused after as long as by the loop, or when late; what is told in time is served; nobody waits."""
    scene = Scene(library, clients=1, wild=1, idle_ns=2**60)
    other, forger = scene.clients
    shard, world = scene.shard, scene.world

    def forged(budget_us: int) -> Waiting:
        forger.push(BODIES[0], scene.handles, budget_us=budget_us)
        yield from forger.answered_to()

    def meanwhile(ns: int, heard: bool) -> Waiting:
        while (NoteKind.TAKEN, forger.link, forger.seq, 0) not in shard.notes:
            yield
        yield from other.step(BODIES[3], scene.handles)
        world.pass_time(ns - 1_000_000)
        yield from other.step(BODIES[3], scene.handles)
        assert not forger.is_answered(), "it was not waited for"
        if heard:
            shard.hold(forger.link, scene.handle)
        else:
            world.pass_time(1_000_000)

    for budget_us, ns in ((2**40, round(Timings.foreign_step * 1e9)), (5_000, 5_000_000)):
        world.write(shard.held[forger.link], 0)
        scene.do(forged(budget_us), meanwhile(ns, heard=False))
        assert forger.code(forger.seq) == "permission_denied"
        scene.do(forged(budget_us), meanwhile(ns, heard=True))
        forger.look(forger.seq, BODIES[0], scene.handles, {scene.handle})
        assert forger.code(forger.seq) == ""
    shard.hold(forger.link, scene.handle + (1 << 16))
    scene.do(forged(1))
    assert forger.code(forger.seq) == "permission_denied", "that of another generation is another"
    assert not any(note[0] == NoteKind.PREFETCH for note in shard.notes), "nothing is loaded for who may not have it"


def weights_are_seen_with_the_word_that_says_so(library: ctypes.CDLL) -> None:
    """While nobody else gives the poller a reason to look."""
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


def every_check_has_its_refusal(library: ctypes.CDLL) -> None:
    """A step with one thing wrong at a time, everywhere, as the loop's own checks judge it."""
    scene = Scene(library, clients=0, wild=1)
    (client,) = scene.clients
    for body in (client.bodies[1], client.bodies[3]):
        for at in range(0, body.parts.rows, 4):
            for value in (0, 3, 0x7FFFFFFF, 0x80000001):
                client.seq += 1
                memory = client.memory(body, scene.handles, client.seq, 2**40)
                memory[at : at + 4] = value.to_bytes(4, "little")
                scene.do(client.one(memory))
                _, request = client.reference.check(bytes(memory), client.id, client.epoch, client.seq)
                code = client.code(client.seq)
                if request is None:
                    assert code == "protocol", f"byte {at} = {value:#x}: got {code}"
                else:
                    assert code != "protocol" or request.header.dtype != body.dtype, f"byte {at} = {value:#x}"


def more_clients_than_orders(library: ctypes.CDLL) -> None:
    """All push at once: nobody's order is overwritten before it was computed, and the oldest goes first."""
    scene = Scene(library, clients=0, wild=6)
    scene.shard.finish(other := scene.shard.begin(1, 1))
    scene.do(*(in_turn(client, range(3), scene.handle, other) for client in scene.clients))
    scene.replay()


def more_clients_than_lanes(library: ctypes.CDLL) -> None:
    """Their shares are one's whose lane knows one client; who goes, also the last, takes no other along."""
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
    """Those behind have had more; who has just come starts with the least of them, and goes before all others."""
    scene = Scene(library, clients=0, wild=5, links=(5, 37, 69, 101, 6), idle_ns=2**60)

    def one_after_the_other(client: WildClient, body: int) -> Waiting:
        for _ in range(8):
            yield from client.steps([BODIES[body]] * DEPTH, scene.handles)

    def comes_anew(client: WildClient) -> Waiting:
        for _ in range(6):
            yield from client.steps([BODIES[0]], scene.handles)
            yield from client.cut_off()
            yield from client.join()

    stay, comes = scene.clients[:-1], scene.clients[-1]
    scene.do(*(one_after_the_other(one, body) for one, body in zip(stay, (0, 3, 1, 2), strict=True)), comes_anew(comes))
    scene.replay()


def answers_keep_their_order(library: ctypes.CDLL) -> None:
    """Beyond a network that keeps what one block put for long, and brings what another put at once."""
    scene = Scene(library, clients=0, wild=1, network=True)
    (client,) = scene.clients
    for _ in range(40):
        scene.do(client.steps([BODIES[0]] * DEPTH, scene.handles))


def a_step_that_a_host_has_written_is_sent(library: ctypes.CDLL) -> None:
    """Through its own copy of the slot, which one kernel puts: what Link does beyond a network."""
    scene = Scene(library, network=True)
    (client,), world = scene.clients, scene.world

    def steps() -> Waiting:
        for turn in range(2 * DEPTH):
            body = BODIES[turn % len(BODIES)]
            client.seq += 1
            memory = client.memory(body, scene.handles, client.seq, BUDGET_NS // 1000)
            client.record(client.seq, memory)
            world.write(client.own_slot(client.seq)[: len(memory)], np.frombuffer(memory, np.uint8))
            yield from client.nothing()  # a kernel of the same queue: what was written before it is seen behind it
            yield from client.ended(client.launch("link_send", client.seq))
            client.state["pushed"] = client.seq
            yield from client.ended(client.launch("link_wait"))
            assert client.state["status"] == LinkStatus.OK
            client.look(client.seq, body, scene.handles, {scene.handle})

    scene.do(steps())
    assert client.answered == 2 * DEPTH


# -- rows in 8 bits


def request_of(scene: Scene, client: WildClient, body: Body) -> bytearray:
    client.seq += 1
    return client.memory(body, scene.handles, client.seq, 2**40)


def refused(scene: Scene, client: WildClient, memory: bytearray, why: Refusal) -> Waiting:
    yield from client.one(memory)
    assert client.code(client.seq) == "protocol"
    while not (notes := [note for note in scene.shard.notes if note[0] == NoteKind.REFUSED and note[2] == client.seq]):
        yield
    assert notes == [(NoteKind.REFUSED, client.index, client.seq, why)]


def a_scale_is_a_number(library: ctypes.CDLL) -> None:
    """Finite, and from 0 on, with and without a map; what it is of is served otherwise."""
    scene = Scene(library, clients=0, wild=1)
    (client,) = scene.clients
    for body in (BODIES_IN_CODES[0], BODIES_IN_CODES[2], BODIES_IN_CODES[3]):
        for scale in (math.nan, -math.nan, math.inf, -math.inf, -1.0, -1e-45, 0.0, -0.0, 3.4e38):
            for row in (0, body.num_rows - 1):
                memory = request_of(scene, client, body)
                struct.pack_into("<f", memory, body.parts.scales + 4 * row, scale)
                if 0.0 <= scale < math.inf:
                    scene.do(client.one(memory))
                    assert client.code(client.seq) == "", scale
                else:
                    scene.do(refused(scene, client, memory, Refusal.BAD_SCALE))


def rows_of_the_other_wire_are_refused(library: ctypes.CDLL) -> None:
    """Before anybody reads their tables; then a sound step is served as ever."""
    scene = Scene(library, clients=0, wild=1)
    (client,) = scene.clients
    own, others = (BODIES_IN_CODES, BODIES) if library.in_codes else (BODIES, BODIES_IN_CODES)
    for body, other in zip(own, others, strict=False):
        scene.do(refused(scene, client, request_of(scene, client, other), Refusal.BAD_WIRE))
        scene.do(client.one(request_of(scene, client, body)))
        client.look(client.seq, body, scene.handles, {scene.handle})


def scales_are_those_that_were_checked(library: ctypes.CDLL) -> None:
    """A client that changes them once they are pushed changes nothing: the shard has its own."""
    scene = Scene(library, clients=0, wild=2)
    scene.shard.finish(other := scene.shard.begin(1, 1))

    def steps(client: WildClient) -> Waiting:
        for turn in range(12):
            body, handles = BODIES_IN_CODES[turn % len(BODIES_IN_CODES)], (scene.handle, other)
            client.push(body, handles)
            ready = (NoteKind.READY, client.index, client.seq, 0)
            while ready not in scene.shard.notes:
                yield
            at, slots = body.parts, client.places.requests[client.seq % DEPTH]
            scene.world.write(slots[at.scales : at.scales + 4 * body.num_rows].view("<f4"), np.float32(math.nan))
            yield from client.answered_to()
            client.look(client.seq, body, handles, {scene.handle, other})

    scene.do(*(steps(client) for client in scene.clients))


NETWORK_CASES = (answers_keep_their_order, a_step_that_a_host_has_written_is_sent)
CASES = (
    more_clients_than_orders, more_clients_than_lanes, clients_of_one_lane_have_shares_of_their_own, nobody_answers,
    a_watchdog_ends_a_wait, a_pass_that_fails_while_a_put_looks_is_sent_whole_or_not_at_all,
    a_refused_step_voids_its_pass, a_lost_block_ends_the_kernel, a_host_stops_everything,
    weights_that_come_late_block_nobody_else, a_step_names_what_its_client_holds_alone,
    weights_are_seen_with_the_word_that_says_so, every_check_has_its_refusal, many_segments_are_looked_up_together,
    rows_of_the_other_wire_are_refused,
)  # fmt: skip
CASES_IN_CODES = (
    a_scale_is_a_number, rows_of_the_other_wire_are_refused, scales_are_those_that_were_checked,
    every_check_has_its_refusal,
)  # fmt: skip
