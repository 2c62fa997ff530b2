"""The arguments of a shard's kernel: struct Serve of protocol.cuh, and the memory that it points to.

The kernel reads it at each launch. Change it before the first one, or between two (ServeKernel.between).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.launch import DTYPE_NAMES, Workspace
from kernels_cuda.residency import LANES
from lora_server.device.protocol import layout
from lora_server.device.protocol.codes import CONNECT_WORDS, MAX_LINKS, MAX_TENANTS, ORDERS, KernelRole
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.layout import LINK, ORDER_BYTES, SERVE, TENANT, parts
from lora_server.spec import PROJECTIONS, ModelSpec
from lora_server.wire import slot
from lora_server.wire.region import RegionLayout

FIRST_RANK = 16
TABLE_ALIGN = 128
ROW_WORDS = 8  # a row of numbers fills so many, or twice as many ...
HELD, TURN = np.dtype("<u4"), np.dtype("<u8")
assert SERVE.fields is not None
HOSTS_BYTES = SERVE.fields["turn"][1]  # the host's part; the rest is the kernel's


class ServeArguments:
    """The struct, word by word. The kernel's own words begin as zeros."""

    def __init__(self, gpu: Gpu, spec: ModelSpec, dtype: torch.dtype, region: RegionLayout, max_step_rows: int) -> None:
        self._gpu, self._spec = gpu, spec
        self._struct = np.zeros(1, SERVE)
        self._memory: dict[str, torch.Tensor] = {}  # by the word that points there
        self._there = self._zeros(SERVE.itemsize)
        self._tables: list[torch.Tensor] = []  # of LANES links each
        self.holds = LinkHolds(gpu, self)
        in_codes = region.widest == slot.E4M3
        self.set(
            max_entries=max_step_rows,
            table_bytes=slot.aligned(region.table_bytes, TABLE_ALIGN),
            dtype=slot.E4M3 if in_codes else slot.DTYPES.index(DTYPE_NAMES[dtype]),
            row_words=slot.aligned(1 + 2 * region.depth, ROW_WORDS),
            num_layers=spec.layers,
            num_projections=len(PROJECTIONS),
        )
        self.point("orders", self._zeros(ORDERS * ORDER_BYTES))
        self.point("tenants", self._zeros(MAX_TENANTS * TENANT.itemsize))
        self.point("sites", self.on_gpu(_sites(spec)))
        self.point("followers", self._zeros(LANES * TURN.itemsize))
        if in_codes:
            widest = max(map(spec.out_width, spec.sites()))
            self.point("results", self._zeros(max_step_rows * widest * dtype.itemsize))
        self.reserve_links(LANES)
        self.reserve_rank(FIRST_RANK)

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._gpu.device)

    def on_gpu(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy an array to the GPU, as bytes."""
        return torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(self._gpu.device)

    def __getitem__(self, name: str) -> int:
        return int(self._struct[0][name])

    def set(self, **words: int) -> None:
        """Set words of the struct."""
        for name, value in words.items():
            self._struct[0][name] = value

    def point(self, name: str, tensor: torch.Tensor) -> None:
        """Let a word of the struct point to a tensor, and keep that."""
        self._memory[name] = tensor
        self.set(**{name: tensor.data_ptr()})

    def reserve_rank(self, max_rank: int) -> None:
        """Make room for blocks of so many ranks."""
        sites = list(self._spec.sites())
        workspace = Workspace.new(
            max_entries=self["max_entries"],
            max_rank=max_rank,
            max_in_width=max(map(self._spec.in_width, sites)),
            max_out_width=max(map(self._spec.out_width, sites)),
            device=self._gpu.device,
        )
        for name in ("partial", "v", "delta", "groups", "arrivals"):
            self.point(name, getattr(workspace, name))
        self.point("other_partial", torch.empty_like(workspace.partial))
        self.set(max_rank=workspace.max_rank)

    def reserve_links(self, num_links: int) -> None:
        """Make room for so many links, a multiple of LANES, beside those that are there."""
        links, have = self._zeros(num_links * LINK.itemsize), self["num_links"]
        if have:
            links[: have * LINK.itemsize] = self._memory["links"]
        self.point("links", links)
        self.set(num_links=num_links)
        self._tables += [self._zeros(LANES * self["table_bytes"]) for _ in range(have, num_links, LANES)]
        self.holds.place()

    def connect_words(self, link: int, words: dict[str, int]) -> list[int]:
        """Return CONNECT's words, as in LINK, with the tables of a place."""
        tables = self._tables[link // LANES].data_ptr() + link % LANES * self["table_bytes"]
        words = words | {"tables": tables}
        return [words.get(str(name), 0) for name in (LINK.names or ())[:CONNECT_WORDS]]

    def read_directory(self, entries: torch.Tensor, num_handles: int) -> torch.Tensor:
        """Use this directory of weights. Returns a new table of the newest turn that used each handle."""
        used = self._zeros(TURN.itemsize * num_handles)
        self.point("directory", entries)
        self.point("used", used)
        self.set(num_handles=num_handles)
        self.holds.place()
        return used

    @property
    def numbers_bytes(self) -> int:
        """Bytes of a follower's table: a row for each link that its leader may have; see leader.cuh."""
        return MAX_LINKS * self["row_words"] * TURN.itemsize

    def lead(self, tables: Sequence[int]) -> None:
        """Give steps numbers, and store these where this GPU sees each follower's table."""
        words = np.zeros(LANES, TURN)
        words[: len(tables)] = tables
        self.set(role=KernelRole.LEADS)
        self._gpu.write(self["followers"], words.tobytes())

    def write(self) -> int:
        """Write the host's part, for the next launch; return the struct's address."""
        self._gpu.settle()  # zeros and tables that torch made
        self._gpu.write(self._there.data_ptr(), self._struct.tobytes()[:HOSTS_BYTES])
        return self._there.data_ptr()


class LinkHolds:
    """The handles that the client at each link may name. One thread calls `hold`, also while the kernel runs."""

    def __init__(self, gpu: Gpu, arguments: ServeArguments) -> None:
        self._gpu, self._arguments = gpu, arguments
        self._handles: dict[int, frozenset[int]] = {}  # by link

    def place(self) -> None:
        """Write the whole table anew: there are more links or handles."""
        held = np.zeros((self._arguments["num_links"], self._arguments["num_handles"]), HELD)
        for link, handles in self._handles.items():
            for index, generation in map(parts, handles):
                if index < held.shape[1]:
                    held[link, index] = generation
        self._arguments.point("held", self._arguments.on_gpu(held))

    def hold(self, link: int, handles: frozenset[int]) -> None:
        """Let the client at a link name these handles from now on, and no others."""
        before, self._handles[link] = self._handles.get(link, frozenset()), handles
        for handle in before - handles:
            self._write(link, parts(handle)[0], 0)
        for handle in handles - before:
            self._write(link, *parts(handle))

    def _write(self, link: int, index: int, generation: int) -> None:
        """Skip what is beyond the directory, which grows before it has a handle there."""
        num_handles = self._arguments["num_handles"]
        if index < num_handles:
            at = (link * num_handles + index) * HELD.itemsize
            self._gpu.write(self._arguments["held"] + at, generation.to_bytes(HELD.itemsize, "little"))


def _sites(spec: ModelSpec) -> npt.NDArray[np.void]:
    sites = np.zeros((spec.layers, len(PROJECTIONS)), layout.SITE)
    for site in spec.sites():
        place = sites[site.layer, PROJECTIONS.index(site.projection)]
        place["in_width"], place["out_width"] = spec.in_width(site), spec.out_width(site)
        place["experts"] = spec.experts_at(site)
    return sites
