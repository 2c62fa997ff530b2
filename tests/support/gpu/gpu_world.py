"""A world of GPUs on this CPU: shared memory, and kernels that run in an order that a seed chooses; see emulator/."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from kernels_cuda.heuristics import Variant
from kernels_cuda.residency import LANES, ThreadBlock, fit
from tests.support.gpu import emulated


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


VARIANT = Variant(bulk_copy=True, warps=2)
SOURCE = (emulated.EMULATOR / "world.cu").read_text()
SHARED_BYTES = 4 << 20
PES, HEAP_BYTES = 7, 192 << 10
LINE = 128
MOST_TURNS = 100_000


class Stuck(AssertionError):
    """No actor can go on, or a kernel did what no kernel may."""


def load(instead: Mapping[str, str] | None = None, nvshmem: bool = False, in_codes: bool = False) -> ctypes.CDLL:
    """The compiled kernels; `instead` has other texts for some files. in_codes: rows have 8 bits."""
    text = f"#define NVSHMEM {int(nvshmem)}\n#define WIRE_E4M3 {int(in_codes)}\n{SOURCE}"
    library = emulated.library("world.cu", VARIANT, {"world.cu": text} | dict(instead or {}))
    library.layout_name.restype = ctypes.c_char_p
    return of_worlds(library, nvshmem, in_codes)


def of_worlds(library: ctypes.CDLL, has_heaps: bool = False, in_codes: bool = False) -> ctypes.CDLL:
    """Tell ctypes, and `World`, what a library has."""
    library.has_heaps, library.in_codes = has_heaps, in_codes
    library.world_now.restype = ctypes.c_uint64
    library.world_failure.restype = ctypes.c_char_p
    return library


class Memory:
    """A bump allocator over memory that begins as NaNs."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.begin = self.bytes.ctypes.data
        self.free = 0

    def clear(self) -> None:
        self.bytes[: self.free] = 0xFF
        self.free = 0

    def new(self, dtype: np.dtype | str, *shape: int, align: int = LINE) -> np.ndarray:
        """Zeros."""
        dtype = np.dtype(dtype)
        at = -(-self.free // align) * align
        self.free = at + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        assert self.free <= len(self.bytes), "a larger memory, please"
        part = self.bytes[at : self.free]
        part[:] = 0
        return part.view(dtype).reshape(shape) if shape else part.view(dtype)


def address(array: np.ndarray | np.void) -> int:
    return array.__array_interface__["data"][0]


class World:
    """One at a time in a process."""

    shared = Memory(SHARED_BYTES)  # what several GPUs, or hosts, see
    private = Memory(4 << 20)

    def __init__(self, seed: int, library: ctypes.CDLL, network: bool = False) -> None:
        """network: of NVSHMEM's PEs; else they are mapped."""
        self.library = library
        self.shared.clear(), self.private.clear()
        library.world_begin(ctypes.c_uint64(seed), ctypes.c_void_p(self.shared.begin), ctypes.c_uint64(SHARED_BYTES))
        if library.has_heaps:
            library.world_heaps(ctypes.c_uint64(HEAP_BYTES), int(network))
        self.heaps = self.shared.new("u1", PES, HEAP_BYTES)
        self.heaps[:] = 0
        self.heap_free = 0
        self.room: Room | None = None

    def limit(self, multiprocessors: int, block_of: Callable[[str], ThreadBlock]) -> None:
        """Let kernels share one GPU's multiprocessors from now on; a block of each takes what `block_of` says."""
        self.room = Room(multiprocessors, block_of, lambda grid: bool(self.library.world_running(grid)))

    def symmetric(self, pe: int, nbytes: int) -> np.ndarray:
        """Zeros in a PE's heap; the same place in all others' is taken too."""
        at, self.heap_free = self.heap_free, -(-(self.heap_free + nbytes) // LINE) * LINE
        assert self.heap_free <= HEAP_BYTES
        return self.heaps[pe, at : at + nbytes]

    def seen_by(self, pe: int, array: np.ndarray) -> int:
        """The address by which a PE names what may lie in another's heap."""
        if not self.library.has_heaps:
            return address(array)
        return address(self.heaps[pe]) + (address(array) - address(self.heaps)) % HEAP_BYTES

    def confirm(self, pe: int) -> None:
        """Order memory as a PE's host does before it reads what a signal announced."""
        if self.library.has_heaps:
            self.library.world_confirm(pe)

    def in_flight(self) -> bool:
        """Whether puts have not come where they go."""
        return self.library.has_heaps and self.library.world_in_flight() > 0

    def launch(
        self, kernel: str, *values: int, grid: int, threads: int, device: int, shared_bytes: int = 128, after: int = 0
    ) -> int:
        """`after`: a launch that its queue has before it, where kernels share one GPU."""
        assert threads <= self.library.bounds.get(kernel, threads), f"{kernel}: {threads} threads, more than its bounds"
        pointer = ctypes.cast(self.library[kernel], ctypes.c_void_p)
        arguments = (ctypes.c_int64 * len(values))(*values)

        def begin() -> int:
            return self.library.world_launch(pointer, grid, threads, shared_bytes, device, arguments, len(values))

        return self.room.launch(kernel, grid, after, begin) if self.room else begin()

    def run(self, turns: int, times: int = 1) -> None:
        """Run so many turns of blocks, or fewer where a kernel ends; so many times."""
        for _ in range(times):
            if self.room:
                self.room.begin()
            if self.library.world_run(turns) < 0:
                raise Stuck((self.library.world_failure() or b"no actor can go on").decode())

    def running(self, grid: int) -> bool:
        if grid < 0 and self.room:
            return not self.room.is_over(grid)
        return bool(self.library.world_running(grid))

    def kill(self, grid: int) -> None:
        self.library.world_kill(grid)

    def freeze(self, grid: int, block: int) -> None:
        """A block of it does not go on until it is thawed."""
        self.library.world_freeze(grid, block, 0)

    def thaw(self, grid: int, block: int) -> None:
        """Let a frozen block go on."""
        self.library.world_freeze(grid, block, 1)

    def hold(self, word: int, passes: int = 0) -> None:
        """Go on until a warp that has loaded a word so often is about to do so again; it waits there until `let_go`."""
        self.library.world_hold(ctypes.c_void_p(word), passes)
        for _ in range(MOST_TURNS):
            self.run(1)
            if self.library.world_held() == LANES:
                return
        raise Stuck("no warp comes to the word that is held")

    def let_go(self) -> None:
        """Let the kernels that are held go on."""
        self.library.world_hold(None, 0)

    def is_ordered(self, word: int, of: np.ndarray, read: bool = False) -> bool:
        """Whether a host that has read the word at that address finds what kernels stored; `read`: and may write it."""
        where = map(ctypes.c_uint64, (word, address(of), of.nbytes))
        return bool(self.library.world_ordered(*where, int(read)))

    def write(self, to: np.ndarray, values: object) -> None:
        """A host's store to memory that GPUs see."""
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(values, to.dtype), to.shape))
        self.library.world_write(*map(ctypes.c_uint64, (address(to), address(data), to.nbytes)))

    def copy_pages(self, to: np.ndarray, data: np.ndarray) -> None:
        """A copy engine's."""
        self.library.world_copy_pages(*map(ctypes.c_uint64, (address(to), address(data), data.nbytes)))

    def watch(self, signal: int, word: int) -> None:
        """See `trips`."""
        self.library.world_watch(ctypes.c_void_p(signal), ctypes.c_void_p(word))

    @property
    def trips(self) -> int:
        """Trips to memory of the thread that released `word` last, from its last relaxed look at `signal` on."""
        return self.library.world_trips()

    @property
    def now(self) -> int:
        return self.library.world_now()

    def pass_time(self, ns: int) -> None:
        self.library.world_pass(ctypes.c_uint64(ns))
