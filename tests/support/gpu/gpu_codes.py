"""What only a shard meets whose clients' rows have 8 bits: scales that are none, rows of the other wire."""

from __future__ import annotations

import ctypes
import math
import struct

import numpy as np

from lora_server.transport.gpu.layout import NoteKind, Refusal
from tests.support.gpu.gpu_cases import Scene, every_check_has_its_refusal
from tests.support.gpu.gpu_clients import WildClient
from tests.support.gpu.gpu_shard import Waiting
from tests.support.gpu.gpu_weights import BODIES, BODIES_IN_CODES, DEPTH, Body


def _request(scene: Scene, client: WildClient, body: Body) -> bytearray:
    client.seq += 1
    return client.memory(body, scene.handles, client.seq, 2**40)


def _refused(scene: Scene, client: WildClient, memory: bytearray, why: Refusal) -> Waiting:
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
                memory = _request(scene, client, body)
                struct.pack_into("<f", memory, body.parts.scales + 4 * row, scale)
                if 0.0 <= scale < math.inf:
                    scene.do(client.one(memory))
                    assert client.code(client.seq) == "", scale
                else:
                    scene.do(_refused(scene, client, memory, Refusal.BAD_SCALE))


def rows_of_the_other_wire_are_refused(library: ctypes.CDLL) -> None:
    """Before anybody reads their tables; then a sound step is served as ever."""
    scene = Scene(library, clients=0, wild=1)
    (client,) = scene.clients
    own, others = (BODIES_IN_CODES, BODIES) if library.in_codes else (BODIES, BODIES_IN_CODES)
    for body, other in zip(own, others, strict=False):
        scene.do(_refused(scene, client, _request(scene, client, other), Refusal.BAD_WIRE))
        scene.do(client.one(_request(scene, client, body)))
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


CASES = (
    a_scale_is_a_number, rows_of_the_other_wire_are_refused, scales_are_those_that_were_checked,
    every_check_has_its_refusal,
)  # fmt: skip
