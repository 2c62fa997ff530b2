"""Places of the experts of sites at which they differ in shape: (block, first tile) of each.

A table in the GPU's memory, with a run of places for each such site of an adapter; it grows while no kernel runs.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch

from lora_server.device.host.kernel import ServeKernel

FIRST_PLACES = 1024
Ints = npt.NDArray[np.int32]


class Places:
    """The table of places. The directory's lock guards it."""

    def __init__(self, kernel: ServeKernel, places: int = FIRST_PLACES) -> None:
        self._kernel = kernel
        self._host = np.zeros((places, 2), np.int32)
        self._used = 0
        self._of: dict[int, list[range]] = {}  # by handle
        self._free: dict[int, list[range]] = defaultdict(list)  # by length
        self._place()

    def _place(self) -> None:
        self._device = torch.from_numpy(self._host.copy()).to(self._kernel.gpu.device)
        self._kernel.arguments.point("places", self._device)

    def put(self, handle: int, places_E2: Ints) -> int:
        """Store the places of a site until `free`; return the number of the first."""
        free = self._free[len(places_E2)]
        run = free.pop() if free else self._new(len(places_E2))
        self._of.setdefault(handle, []).append(run)
        self._host[run.start : run.stop] = places_E2
        address = self._device.data_ptr() + run.start * self._host[0].nbytes
        self._kernel.gpu.write(address, self._host[run.start : run.stop].tobytes())
        return run.start

    def _new(self, length: int) -> range:
        while self._used + length > len(self._host):
            self._host = np.concatenate([self._host, np.zeros_like(self._host)])
            if self._used + length <= len(self._host):
                self._kernel.between(self._place)
        self._used += length
        return range(self._used - length, self._used)

    def free(self, handle: int) -> None:
        """Free an adapter's places, which no step reads any more."""
        for run in self._of.pop(handle, []):
            self._free[len(run)].append(run)
