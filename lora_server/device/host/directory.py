"""The directory of weights that a shard's kernel reads: for (handle, site) an Entry of protocol.cuh, in GPU memory.

A handle is an index and a generation. A step waits for an adapter that is known and not READY, and for a while for one
that the shard has not heard of yet; a handle of another generation, or of one that is GONE, is refused. READY is
written after everything else, and taken back before pages are: the kernel acknowledges that, and the pages are free
once it has done what it ordered before.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from lora_server.device.host.arguments import TURN
from lora_server.device.host.kernel import ServeKernel
from lora_server.device.protocol.codes import GONE_BIT, HANDLE_BITS, UNEVEN, CommandKind
from lora_server.device.protocol.layout import ENTRY, MAX_GENERATION, handle_of, parts
from lora_server.errors import AdapterLoadError
from lora_server.spec import PROJECTIONS

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


class DeviceDirectory:
    """The directory. Thread-safe. It grows while no kernel runs."""

    def __init__(self, kernel: ServeKernel, layers: int) -> None:
        self._kernel, self._layers = kernel, layers
        self._lock, self._places = threading.Lock(), Places(kernel)
        self._host = np.zeros((FIRST_PLACES, layers, len(PROJECTIONS)), ENTRY)
        self._place()

    def _place(self) -> None:
        """Copy all of it to the GPU, and let the kernel use it."""
        self._device = self._kernel.arguments.on_gpu(self._host)
        self._used, self._seen = self._kernel.arguments.read_directory(self._device, len(self._host)), 0

    def know(self, handle: int, foreign: Collection[int]) -> None:
        """Let steps that name it wait until `put`; at `foreign` layers, which are other shards', refuse them.

        Raises AdapterLoadError where another has its index, or it has none.
        """
        index, generation = parts(handle)
        if not 0 < generation <= MAX_GENERATION:
            raise AdapterLoadError(f"handle {handle}: got generation {generation}, expected 1 to {MAX_GENERATION}")
        with self._lock:
            while index >= len(self._host):
                self._grow()
            entries = self._host[index]
            if entries["generation"].any() and entries["generation"].max() != generation:
                raise AdapterLoadError(
                    f"handle {handle}: its place belongs to an adapter that came {1 << HANDLE_BITS} adapters earlier; "
                    "remove and add that one again"
                )
            entries[:] = np.zeros(1, ENTRY)
            entries["generation"] = generation
            entries["ready"][list(foreign)] = generation
            self._write(index)

    def _grow(self) -> None:
        longer = np.zeros((2 * len(self._host), *self._host.shape[1:]), ENTRY)
        longer[: len(self._host)] = self._host
        self._host = longer
        self._kernel.between(self._place)

    def take_uses(self) -> list[int]:
        """Return the handles that steps named since the last call, the oldest use first."""
        with self._lock:
            turns = np.frombuffer(self._kernel.gpu.read(self._used.data_ptr(), self._used.nbytes), TURN)
            newer = np.flatnonzero(turns > self._seen)
            self._seen = max(self._seen, int(turns.max()))
            oldest_first = newer[np.argsort(turns[newer], kind="stable")]
            used = [(int(index), int(self._host[index]["generation"].max())) for index in oldest_first]
        return [handle_of(index, generation) for index, generation in used if generation]

    def put(self, handle: int, layer: int, fields: Mapping[int, tuple[range, Ints]]) -> None:
        """Publish a layer's weights: by projection experts, and of each its row and first tile."""
        index, generation = parts(handle)
        with self._lock:
            entries = self._host[index, layer]
            for projection, (experts, places_E2) in fields.items():
                entries[projection] = (0, generation, *self._where(handle, places_E2), experts.start, experts.stop)
            self._write(index, layer)
            entries["ready"] = generation
            self._write_words(index, [layer])

    def _where(self, handle: int, places_E2: Ints) -> tuple[int, int, int]:
        """Return row, first tile and tiles of each expert, or UNEVEN tiles."""
        if not len(places_E2):
            return 0, 0, 0
        row, first_tile = map(int, places_E2[0])
        each = int(places_E2[1, 1]) - first_tile if len(places_E2) > 1 else 0
        if (places_E2[:, 0] == row).all() and (np.diff(places_E2[:, 1]) == each).all():
            return row, first_tile, each
        return 0, self._places.put(handle, places_E2), UNEVEN

    def take_back(self, handle: int, foreign: Collection[int]) -> None:
        """Let steps wait for it again; return when no step reads what it had."""
        index, generation = parts(handle)
        own = [layer for layer in range(self._layers) if layer not in foreign]
        with self._lock:
            if self._host[index]["generation"].max() == generation:  # it was not forgotten before
                self._host[index]["ready"][own] = 0
                self._write_words(index, own)
        self._retire(index)
        with self._lock:
            self._places.free(handle)

    def forget(self, handle: int) -> None:
        """Refuse steps that name it; return when no step reads what it had."""
        index, generation = parts(handle)
        with self._lock:
            if index >= len(self._host) or self._host[index]["generation"].max() != generation:
                return
            self._host[index]["ready"] = 1 << GONE_BIT | generation
            self._host[index]["generation"] = 0
            self._write_words(index, range(self._layers))
            self._write(index)
        self._retire(index)  # until then a step that found it ready reads the rest of its fields
        with self._lock:
            self._places.free(handle)

    def _retire(self, index: int) -> None:
        mailbox = self._kernel.mailbox
        if not mailbox.closed and self._kernel.launches:
            mailbox.settle(mailbox.post(CommandKind.RETIRE, index))

    def _address(self, index: int, layer: int = 0, projection: int = 0) -> int:
        place = (index * self._layers + layer) * len(PROJECTIONS) + projection
        return self._device.data_ptr() + place * ENTRY.itemsize

    def _write(self, index: int, layer: int | None = None) -> None:
        part = self._host[index] if layer is None else self._host[index, layer]
        self._kernel.gpu.write(self._address(index, layer or 0), part.tobytes())

    def _write_words(self, index: int, layers: Collection[int]) -> None:
        """Write the `ready` of some layers, each at once."""
        words = {
            self._address(index, layer, projection): int(self._host[index, layer, projection]["ready"])
            for layer in layers
            for projection in range(len(PROJECTIONS))
        }
        self._kernel.gpu.write_words(words)
