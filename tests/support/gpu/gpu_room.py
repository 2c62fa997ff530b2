"""Multiprocessors of one GPU: which blocks are resident on each, and launches that wait until theirs find room.

A kernel begins once all its blocks fit beside what is resident, in the order of the launches, and behind the kernel
that its queue has before it. So kernels that wait for each other do so here as on a GPU; see kernels_cuda/residency.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernels_cuda.residency import ThreadBlock, fit


class Launch(NamedTuple):
    number: int
    blocks: int
    block: ThreadBlock
    after: int  # another launch, or 0
    begin: Callable[[], int]  # starts it in the emulator; its grid


class Room:
    def __init__(
        self, multiprocessors: int, block_of: Callable[[str], ThreadBlock], running: Callable[[int], bool]
    ) -> None:
        """block_of: what a block of a kernel takes. running: whether a grid has not ended."""
        self._block_of, self._running = block_of, running
        self._resident: list[dict[int, list[ThreadBlock]]] = [{} for _ in range(multiprocessors)]  # by launch
        self._waiting: list[Launch] = []
        self._grids: dict[int, int] = {}  # of launches that began
        self._launched = 0

    def launch(self, kernel: str, blocks: int, after: int, begin: Callable[[], int]) -> int:
        """The launch's number, below zero: it may have to wait. Raises ValueError for a kernel that never fits."""
        block = self._block_of(kernel)
        if not fit([block]):
            raise ValueError(f"{kernel}: {block} does not fit on a multiprocessor")
        self._launched -= 1
        self._waiting.append(Launch(self._launched, blocks, block, after, begin))
        return self._launched

    def grid(self, number: int) -> int:
        """Return the grid of a launch that began; 0 for one that waits."""
        return self._grids.get(number, 0)

    def is_over(self, number: int) -> bool:
        return number in self._grids and not self._running(self._grids[number])

    def begin(self) -> None:
        """Begin the waiting launches that fit now, in their order."""
        for resident in self._resident:
            for number in [number for number in resident if self.is_over(number)]:
                del resident[number]
        for launch in list(self._waiting):
            places = None if launch.after and not self.is_over(launch.after) else self._places(launch)
            if places is not None:
                self._waiting.remove(launch)
                for place in places:
                    self._resident[place].setdefault(launch.number, []).append(launch.block)
                self._grids[launch.number] = launch.begin()

    def _places(self, launch: Launch) -> list[int] | None:
        """A multiprocessor for each of its blocks, the emptiest first; None if there are too few."""
        taken = [[block for blocks in resident.values() for block in blocks] for resident in self._resident]
        places = []
        for _ in range(launch.blocks):
            place = min(range(len(taken)), key=lambda i: len(taken[i]))
            free = [i for i in (place, *range(len(taken))) if fit([*taken[i], launch.block])]
            if not free:
                return None
            taken[free[0]].append(launch.block)
            places.append(free[0])
        return places
