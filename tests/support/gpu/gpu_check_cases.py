"""Steps that a shard's kernel must refuse: malformed, with another client's adapters, or with NaNs."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable

import numpy as np

from lora_server.device.protocol.codes import NoteKind, Refusal
from lora_server.device.protocol.layout import handle_of
from lora_server.timings import Timings
from tests.support.gpu.gpu_clients import WildClient
from tests.support.gpu.gpu_scene import Scene
from tests.support.gpu.gpu_shard import HANDLES, Waiting
from tests.support.gpu.gpu_weights import BODIES, BODIES_IN_CODES, DEPTH, Body

FOREIGN_NS = round(Timings.foreign_step * 1e9)


def a_step_names_what_its_client_holds_alone(library: ctypes.CDLL) -> None:
    """A step with an adapter that its client does not hold, or that the shard has not heard of, waits as long as at the
    loop, or until it is late, and is refused, unless the shard is told in time. No other client waits for it."""
    scene = Scene(library, clients=1, wild=1, idle_ns=2**60)
    other, forger = scene.clients
    shard, world = scene.shard, scene.world

    def forged(budget_us: int, handle: int = scene.handle) -> Waiting:
        forger.push(BODIES[0], (handle, handle), budget_us=budget_us)
        yield from forger.answered_to()

    def meanwhile(ns: int, hears: Callable[[], object] | None = None) -> Waiting:
        while (NoteKind.TAKEN, forger.link, forger.seq, 0) not in shard.notes:
            yield
        yield from other.step(BODIES[3], scene.handles)
        world.pass_time(ns - 1_000_000)
        yield from other.step(BODIES[3], scene.handles)
        assert not forger.is_answered(), "it was not waited for"
        if hears is not None:
            hears()
        else:
            world.pass_time(1_000_000)

    for budget_us, ns in ((2**40, FOREIGN_NS), (5_000, 5_000_000)):
        world.write(shard.held[forger.link], 0)
        scene.do(forged(budget_us), meanwhile(ns))
        assert forger.code(forger.seq) == "permission_denied"
        scene.do(forged(budget_us), meanwhile(ns, lambda: shard.hold(forger.link, scene.handle)))
        forger.look(forger.seq, BODIES[0], scene.handles, {scene.handle})
        assert forger.code(forger.seq) == ""
    shard.hold(forger.link, scene.handle + (1 << 16))
    scene.do(forged(1))
    assert forger.code(forger.seq) == "permission_denied", "that of another generation is another"
    world.write(shard.directory["ready"][1], 0)  # no adapter has had this index yet
    for new in (handle_of(1, 1), handle_of(HANDLES + 1, 1)):
        scene.do(forged(2**40, new), meanwhile(FOREIGN_NS))
        assert forger.code(forger.seq) == "unknown_adapter"
    scene.do(forged(2**40, handle_of(1, 1)), meanwhile(FOREIGN_NS, lambda: shard.finish(shard.begin(1, 0))))
    forger.look(forger.seq, BODIES[0], (handle_of(1, 1),) * 2, {handle_of(1, 1)})
    assert forger.code(forger.seq) == ""
    assert not any(note[0] == NoteKind.PREFETCH for note in shard.notes), "nothing is loaded for another"


def every_check_has_its_refusal(library: ctypes.CDLL) -> None:
    """A step with one thing wrong at a time, everywhere, as the loop's own checks judge it."""
    scene = Scene(library, clients=0, wild=1)
    (client,) = scene.clients
    for body in (client.bodies[1], client.bodies[3]):
        for at in range(0, body.parts.rows, 4):
            for value in (0, 3, 1 << 22, 0x7FFFFFFF, 0x80000001):
                client.seq += 1
                memory = client.memory(body, scene.handles, client.seq, 2**40)
                memory[at : at + 4] = value.to_bytes(4, "little")
                scene.do(client.one(memory), told_of_all(client))
                _, request = client.reference.check(bytes(memory), client.id, client.epoch, client.seq)
                code = client.code(client.seq)
                if request is None:
                    assert code == "protocol", f"byte {at} = {value:#x}: got {code}"
                else:
                    assert code != "protocol" or request.header.dtype != body.dtype, f"byte {at} = {value:#x}"


def told_of_all(client: WildClient) -> Waiting:
    """Pass the time within which a shard would have been told of an adapter, until the step is answered."""
    while not client.is_answered():
        for _ in range(200):
            yield
        client.world.pass_time(FOREIGN_NS)


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
    """Rows of the other wire are refused before their tables are read; a sound step after them is served as usual."""
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
