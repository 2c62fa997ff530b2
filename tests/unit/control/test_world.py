"""NVSHMEM's world as its controller sees it: which process has which place, when it is made, when it is over."""

from __future__ import annotations

import os
import time

import pytest

from client_connector.connect import gathered
from lora_server.control.members.shards import ShardHandle, ShardTable
from lora_server.control.members.world import WorldMembership
from lora_server.errors import ConfigError, ServerUnavailableError, WorldError
from lora_server.placement import Layout
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import drained
from tests.support.serving import HANG_SECONDS

UID_BYTES = 128
ANY = pb.Place()


class Scene:
    """A world of two shards; each process of a shard has a handle of its own."""

    def __init__(self, clients: int = 2, rest_seconds: float = 60.0) -> None:
        self.table = ShardTable(Layout.parse("ep2-pp1"), "independent")
        self.world = WorldMembership(self.table, 2, clients, 4, rest_seconds)
        self.handles = dict[int, ShardHandle]()

    def arrive(self, shard: int, place: pb.Place | None = None, instance: str = "") -> set[int]:
        """A new process, unless it has a place, or is an earlier one's instance."""
        offered = pb.Place(uid=os.urandom(UID_BYTES) if shard == 0 else b"")
        told = pb.Registration(shard=shard, instance=instance or os.urandom(4).hex(), place=place or offered)
        handle = self.handles[shard] = ShardHandle(told)
        if shard in self.table.live():
            self.table.depart(self.table.live()[shard])
        self.table.arrive(handle)
        return self.world.arrive(told)

    @classmethod
    def made(cls, clients: int = 2, rest_seconds: float = 60.0) -> Scene:
        """Both shards and all engines are there; engines are clients 7 and up."""
        scene = cls(clients, rest_seconds=rest_seconds)
        scene.arrive(0), scene.arrive(1)
        for client in range(7, 7 + clients):
            scene.world.take(client, ANY)
        return scene

    def told(self, shard: int) -> list[str]:
        """The kinds of commands that its newest process was sent, and nothing that comes later."""
        return [str(command.WhichOneof("command")) for command in drained(self.handles[shard])]


def test_the_unique_id_is_kept_until_all_are_there():
    scene = Scene()
    scene.arrive(1)
    places = [scene.world.take(7, ANY)]
    scene.arrive(0)
    assert scene.world.reason == "NVSHMEM's world: 2 of 2 shards and 1 of 2 engines are here"
    scene.world.give_back(7, rests=True)
    places = [scene.world.take(client, ANY) for client in (8, 9)]
    assert [place.rank for place in places] == [2, 3], "the place of one that went before it was made is the next one's"
    assert [bool(place.uid) for place in places] == [False, True] and scene.world.reason == ""
    made = scene.world.of(8)
    assert (made.size, made.slots, len(made.uid)) == (4, 4, UID_BYTES) and made.uid == places[1].uid
    assert [scene.told(shard) for shard in (0, 1)] == [["place"], ["place"]]
    with pytest.raises(WorldError, match="client 7 has no place"):
        scene.world.of(7)


def test_all_places_are_taken_and_a_complete_world_is_closed():
    scene = Scene(clients=1)
    scene.arrive(1)
    scene.world.take(7, ANY)
    with pytest.raises(WorldError, match="all 1 places of engines are taken; start the server with a larger --nvsh"):
        scene.world.take(8, ANY)
    scene.arrive(0)
    scene.world.give_back(7, rests=True)
    with pytest.raises(WorldError, match=r"is complete, and no process joins it any more \(1 of 1 places"):
        scene.world.take(8, ANY)


def test_a_process_returns_only_to_its_own_place():
    scene = Scene.made()
    own = scene.world.of(7)
    with pytest.raises(ServerUnavailableError, match="PE 2 still has the lease of client 7"):
        scene.world.take(9, own)
    scene.world.give_back(7, rests=False)
    for other in (pb.Place(world=own.world, rank=2, uid=b"x" * UID_BYTES), pb.Place(world=1, rank=2, uid=own.uid)):
        with pytest.raises(WorldError, match="a process is in one world in its life"):
            scene.world.take(9, other)
    with pytest.raises(WorldError, match="is over"):
        scene.world.take(9, pb.Place(world=own.world, rank=0, uid=own.uid))
    assert scene.world.take(9, own) == own


def test_a_place_that_was_cut_off_rests():
    scene = Scene.made(clients=1, rest_seconds=60.0)
    own = scene.world.of(7)
    scene.world.give_back(7, rests=True)
    with pytest.raises(ServerUnavailableError, match=r"may still be on its way; it may come back in \d+ s"):
        scene.world.take(8, own)
    scene = Scene.made(clients=1, rest_seconds=0.0)
    own = scene.world.of(7)
    scene.world.give_back(7, rests=True)
    assert scene.world.take(8, own) == own


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_shard_ends_the_world(dead):
    scene = Scene.made()
    before = scene.world.of(7)
    assert scene.arrive(dead) == {7, 8}, "their leases end"
    assert scene.told(1 - dead) == ["place", "stop"], "the other one starts anew"
    assert scene.arrive(1 - dead) == set()
    places = [scene.world.take(client, ANY) for client in (9, 10)]
    assert places[1].world > before.world and places[1].uid not in (b"", before.uid)
    assert [scene.told(shard) for shard in (0, 1)] == [["place"], ["place"]]


def test_a_shard_that_dies_early_or_whose_stream_broke_ends_nothing():
    scene = Scene()
    scene.arrive(0)
    scene.world.take(7, ANY)
    old = scene.handles[0].registration.place.uid
    assert scene.arrive(0) == set() and scene.arrive(1) == set()
    place = scene.world.take(8, ANY)
    assert place.uid == scene.handles[0].registration.place.uid != old, "of the process that lives"
    assert scene.arrive(1, instance=scene.handles[1].registration.instance) == set()
    assert scene.told(1) == ["place"] and scene.world.of(8) == place, "it is told its place again"


def test_a_later_controller_learns_the_world_from_its_shards():
    first = Scene.made()
    own = first.world.of(7)
    places = [pb.Place(world=own.world, rank=shard, size=4, uid=own.uid, slots=4) for shard in range(2)]
    later = Scene()
    later.world.adopt(8, 3)
    assert [later.arrive(shard, places[shard]) for shard in range(2)] == [set(), set()]
    assert later.world.reason == "" and later.world.take(9, own) == own
    with pytest.raises(WorldError, match="is complete"):
        later.world.take(10, ANY)
    assert [later.told(shard) for shard in (0, 1)] == [[], []], "they are in it"


def test_a_shard_of_an_earlier_world_is_stopped():
    own = Scene.made(clients=1).world.of(7)
    later = Scene(clients=1)
    later.arrive(0)  # it died while there was no controller
    assert later.arrive(1, pb.Place(world=own.world, rank=1, size=3, uid=own.uid)) == set()
    assert later.told(1) == ["stop"] and "1 of 2 shards" in later.world.reason


def test_without_places_for_engines_there_is_no_world():
    scene = Scene(clients=0)
    assert scene.arrive(0) == set() and scene.world.reason == ""
    with pytest.raises(ConfigError, match="start it with --device cuda --gpu-transport nvshmem --nvshmem-clients N"):
        scene.world.take(7, ANY)


def test_an_engine_waits_until_the_world_is_complete_and_is_told_what_is_missing():
    scene = Scene()
    scene.arrive(0), scene.arrive(1)
    place = scene.world.take(7, ANY)

    def away():
        raise ServerUnavailableError("the controller is away")

    here = r"NVSHMEM's world: 2 of 2 shards and 1 of 2 engines are here\); .*WORLD_SECONDS"
    for reason, said in ((lambda: scene.world.reason, here), (away, r"the controller is away\)")):
        with pytest.raises(ServerUnavailableError, match=rf"not all 4 PEs .* in time \({said}"):
            gathered(place, lambda: scene.world.of(7), reason, time.monotonic())

    def ask():
        scene.world.take(8, ANY)
        return scene.world.of(7)

    assert not place.uid
    place = gathered(place, ask, lambda: scene.world.reason, time.monotonic() + HANG_SECONDS)
    assert len(place.uid) == UID_BYTES and place.rank == 2
