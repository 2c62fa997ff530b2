"""Everything stays in host memory, as the tensors that the CPU kernels take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kernels_cuda.ops import NOTHING, Block, Segment
from lora_server.memory.loader import LoadingStore, Place
from lora_server.memory.store import Memory, State
from lora_server.spec import Site


class _HostPlace(Place):
    def __init__(self) -> None:
        self.blocks: dict[tuple[Site, int], Block] = {}

    @override
    def put(self, site: Site, expert: int, block: Block) -> None:
        self.blocks[site, expert] = block
        self.nbytes += block.a_RK.nbytes + sum(pair.b_OR.nbytes for pair in block.pairs)

    @override
    def end_layer(self, layer: int) -> None:
        pass

    @override
    def hide(self) -> None:
        pass

    @override
    def free(self) -> None:
        """The last reference does it: a step that runs keeps its tensors, and finds all of them."""


class ResidentStore(LoadingStore[_HostPlace]):
    """Every adapter's tensors, as the loader read them."""

    @override
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], where: str) -> list[Segment]:
        return [
            Segment(self._block(handle, site, expert, where), first, num_entries)
            for handle, expert, first, num_entries in segments_S4.tolist()
        ]

    def _block(self, handle: int, site: Site, expert: int, where: str) -> Block:
        entry = self._entries.get(handle)
        state = State.UNKNOWN if entry is None else entry.state(site.layer)
        if entry is not None and state is State.READY:
            found = entry.place.blocks.get((site, expert))
            if found is not None:
                return found
            if expert in self._placement.experts(site, self._shard):
                return NOTHING
        raise self._refusal(handle, state, site, expert, where)

    @override
    def memory(self) -> Memory:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(number) for name, number, *_ in lines}
        return Memory("cpu", kib["MemAvailable:"] * 1024, kib["MemTotal:"] * 1024)

    @override
    def _place(self, handle: int) -> _HostPlace:
        return _HostPlace()
