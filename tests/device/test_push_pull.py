"""The kernels of bench.gpu_run.push_pull on this CPU: what a shard pulls, and answers, is what its client has."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu_run import push_pull
from tests.support.gpu import gpu_world
from tests.support.gpu.gpu_world import VARIANT, World, address

pytestmark = pytest.mark.emulator
CLIENT, SHARD = 1, 0
NBYTES, GRID, THREADS, LIMIT_NS = 1552, 2, VARIANT.warps * 32, 10**9  # nothing that divides evenly
SEEDS, ROUNDS, TURNS = 12, 3, 4_000
SOURCE = gpu_world.SOURCE.replace('#include "link.cu"', '#include "link.cu"\n#include "push_pull.cu"')


def load(nvshmem: bool):
    files = {"world.cu": f"#define NVSHMEM {int(nvshmem)}\n{SOURCE}", "push_pull.cu": push_pull.SOURCE.read_text()}
    return gpu_world.load(files, nvshmem)


class Place:
    """One client's rows, and a shard's memory for them, in a world."""

    def __init__(self, seed: int, library, network: bool = False) -> None:
        self.world = world = World(seed, library, network)
        self.random = np.random.default_rng(seed)
        self.x = world.symmetric(CLIENT, NBYTES)
        self.rows, self.slot = world.symmetric(SHARD, NBYTES), world.symmetric(SHARD, NBYTES)
        self.answer = world.symmetric(CLIENT, NBYTES)
        self.signal, self.reply = world.symmetric(SHARD, 8), world.symmetric(CLIENT, 8)
        self.here, self.began, self.done = (world.private.new("<u8", 1) for _ in range(3))
        self.arrived = [world.private.new("<u8", 2) for _ in range(2)]
        self.value, self.grids = 0, list[int]()

    def launch(self, kernel: str, values: list[int], device: int, grid: int = GRID) -> None:
        self.grids.append(self.world.launch(kernel, *values, grid=grid, threads=THREADS, device=device))

    def drive(self) -> None:
        for _ in range(TURNS):
            self.world.run(200)
            self.grids = [grid for grid in self.grids if self.world.running(grid)]
            if not self.grids:
                return
        raise AssertionError(f"not over: {len(self.grids)} kernels, reply {self.reply.view('<u8')[0]}")

    def one(self, pulls: bool) -> None:
        """A push or a pull, and its answer; the shard waits before the client sends, or after."""
        self.value += 1
        self.x[:] = self.random.integers(0, 256, NBYTES)
        self.rows[:], self.answer[:], expected = 0, 0, self.x.copy()
        self.launch("stamp", [address(self.began)], CLIENT, 1)
        self.drive()
        for which in self.random.permutation(2):
            (self.send, self.take)[which](pulls)
        waits = push_pull.await_values(address(self.reply), self.value, LIMIT_NS, address(self.done))
        self.launch("await_answer", waits, CLIENT, 1)
        self.drive()
        self.world.confirm(CLIENT)
        assert np.array_equal(self.rows, expected) and np.array_equal(self.answer, expected)
        assert self.began[0] < self.here[0] < self.done[0]

    def send(self, pulls: bool) -> None:
        to, nbytes = (self.slot, 128) if pulls else (self.rows, NBYTES)
        values = (address(self.x), address(to), nbytes, address(self.arrived[0]), address(self.signal), self.value)
        self.launch("raw_put", [*values], CLIENT)

    def take(self, pulls: bool) -> None:
        values = push_pull.take_values(
            address(self.signal), self.value, address(self.x) if pulls else 0, address(self.rows), address(self.answer),
            NBYTES, address(self.arrived[1]), address(self.here), address(self.reply), LIMIT_NS,
        )  # fmt: skip
        self.launch("take", values, SHARD)


class FarPlace(Place):
    """Beyond a network, or mapped: all by NVSHMEM."""

    def send(self, pulls: bool) -> None:
        to, nbytes = (self.slot, 128) if pulls else (self.rows, NBYTES)
        own = self.world.heaps[CLIENT, address(to) - address(self.world.heaps) :][:nbytes]
        own[:] = self.x[:nbytes]
        place, signal = (self.world.seen_by(CLIENT, array) for array in (to, self.signal))
        self.launch("far_put", [place, nbytes, signal, self.value, SHARD], CLIENT, 1)

    def take(self, pulls: bool) -> None:
        at = [self.world.seen_by(SHARD, array) for array in (self.signal, self.x, self.rows, self.answer, self.reply)]
        values = [at[0], self.value, at[1] if pulls else 0, at[2], at[3], NBYTES, CLIENT, address(self.here), at[4]]
        self.launch("far_take", [*values, LIMIT_NS], SHARD, 1)


@pytest.mark.parametrize(
    ("place", "nvshmem", "network"),
    [(Place, False, False), (FarPlace, True, False), (FarPlace, True, True)],
    ids=["here", "mapped", "network"],
)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_shard_pulls_and_answers_what_the_client_has(seed, place, nvshmem, network):
    one = place(seed, load(nvshmem), network)
    for turn in range(ROUNDS):
        one.one(pulls=turn % 2 == 0)


def test_a_signal_that_never_comes_ends_the_wait():
    place = Place(0, load(nvshmem=False))
    place.value, place.here[:] = 1, 0
    place.take(pulls=True)
    place.world.run(1_000)  # it has begun to wait
    assert place.world.running(place.grids[0])
    place.world.pass_time(2 * LIMIT_NS)
    place.drive()
    assert place.here[0] == 0 and place.reply.view("<u8")[0] == 0
