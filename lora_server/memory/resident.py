"""Everything stays in host memory, as the tensors that the CPU kernels take."""

from __future__ import annotations

from typing_extensions import override

from kernels_cuda.ops import NOTHING, Block
from lora_server.memory.loader import LoadingStore, Place
from lora_server.spec import Site


class _HostPlace(Place):
    def __init__(self) -> None:
        self._blocks: dict[tuple[Site, int], Block] = {}

    @override
    def put(self, site: Site, expert: int, block: Block) -> None:
        self._blocks[site, expert] = block
        self.nbytes += block.a_RK.nbytes + sum(pair.b_OR.nbytes for pair in block.pairs)

    @override
    def end_layer(self) -> None:
        pass

    @override
    def find(self, site: Site, expert: int) -> Block | None:
        return self._blocks.get((site, expert))

    @override
    def free(self) -> None:
        """A step that runs keeps its tensors alive."""
        self._blocks = {}
        self.nbytes = 0


class ResidentStore(LoadingStore):
    """Every adapter's tensors, as the loader read them."""

    def _place(self) -> Place:
        return _HostPlace()

    def _nothing(self, site: Site) -> Block:
        return NOTHING
