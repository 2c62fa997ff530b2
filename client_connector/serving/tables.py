"""What changes from step to step for kernels whose arguments never do: which row has which adapter, and where each
adapter has a delta. One buffer on the engine's device; a step is one copy into it.

Shapes: T rows that an engine's step has at most, A adapters that it has at most, S sites of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from client_connector.routing import Batch
from kernels_cuda.routing import DIRECTORY_INTS
from lora_server.errors import ConfigError
from lora_server.spec import Site
from lora_server.transport.session import Held

NOBODY = -1  # of a row without an adapter


class StepTables:
    """adapters_T: int32, each row's place in the directories, or -1; live: int32 [1], whether one has an adapter.

    One thread, one stream of the engine's.
    """

    def __init__(self, sites: Sequence[Site], max_rows: int, max_adapters: int, device: torch.device) -> None:
        """All rows are the base model's."""
        self._max_rows, self._max_adapters, self._sites = max_rows, max_adapters, sites
        rows = slice(1, 1 + max_rows)  # behind `live`
        numbers = rows.stop + len(sites) * max_adapters * DIRECTORY_INTS
        self._host = torch.zeros(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows_T = self._host[rows]
        self._rows_T[:] = NOBODY
        self._device = self._host.to(device, copy=True)
        self._listed_SA3 = self._host[rows.stop :].view(len(sites), max_adapters, DIRECTORY_INTS)
        self._directories = self._device[rows.stop :].view(len(sites), max_adapters, DIRECTORY_INTS)
        self._index = {site: index for index, site in enumerate(sites)}
        self.live, self.adapters_T = self._device[:1], self._device[rows]
        self._places: dict[int, int] = {}  # by handle
        self._listed = False  # places that the device has not heard of
        self._used = 0  # rows up to which one may have an adapter
        self._copied: torch.cuda.Event | None = None

    def directory(self, site: Site) -> torch.Tensor:
        """int32 [A, 3]: (handle, 0, 1), or (handle, 0, 0) of one without a delta there; see kernels_cuda.routing."""
        return self._directories[self._index[site]]

    def forget(self) -> None:
        """Handles mean other adapters from now on."""
        self._places.clear()

    def write(self, batch: Batch | None) -> None:
        """The rows of the pass that is queued next on torch's current stream; all others are the base model's.

        Raises ConfigError for more rows or adapters than there is room for.
        """
        if batch is None and not self._used:
            return
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one reads what is written here
        self._rows_T[: self._used] = NOBODY
        used = 0
        if batch is not None:
            self._list(batch.held)
            used = self._place(batch)
        self._host[0] = int(used > 0)
        end = self._host.numel() if self._listed else 1 + max(used, self._used)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        self._used, self._listed = used, False
        if self._device.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _list(self, held: Sequence[Held]) -> None:
        """Places for adapters that have none."""
        if len(held) > self._max_adapters:
            raise ConfigError(f"got {len(held)} adapters in one step, expected at most {self._max_adapters}")
        new = [one for one in held if one.handle not in self._places]
        if not new:
            return
        self._listed = True
        here = {one.handle for one in held}
        self._places = {handle: place for handle, place in self._places.items() if handle in here}
        free = sorted(set(range(self._max_adapters)) - set(self._places.values()))
        for one, place in zip(new, free, strict=False):
            self._places[one.handle] = place
            self._listed_SA3[:, place, 0] = one.handle
            self._listed_SA3[:, place, 2] = torch.tensor([site in one.sites for site in self._sites], dtype=torch.int32)

    def _place(self, batch: Batch) -> int:
        """Where the last row with an adapter ends."""
        end = int(batch.rows_R.max()) + 1
        if end > self._max_rows:
            raise ConfigError(f"got a step of {end} rows or more, expected at most {self._max_rows}")
        handles, index_R = torch.unique_consecutive(batch.handles_R, return_inverse=True)
        places = torch.tensor([self._places[handle] for handle in handles.tolist()], dtype=torch.int32)
        self._rows_T[batch.rows_R] = places[index_R]
        return end
