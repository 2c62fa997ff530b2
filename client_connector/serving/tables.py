"""Tables that kernels with fixed arguments read: each row's adapter, and the sites where each adapter has a delta.
They are one buffer on the engine's device, and one copy per step writes it.

Shapes: T rows that an engine's step has at most, A adapters that it has at most, S sites of the model; H is 2 if an
adapter is in the base weights, which other rows subtract, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from client_connector.routing import Batch
from kernels_cuda.routing import DIRECTORY_INTS
from lora_server.errors import ConfigError
from lora_server.spec import Site
from lora_server.wire.terms import Held

NOBODY = -1  # of a row without an adapter
SIGNS = (1.0, -1.0)  # the weights of the adapters in the tables


class _Buffer(NamedTuple):
    """The tables, int32, on the host or on the device."""

    whole: torch.Tensor
    live: torch.Tensor  # [1]
    adapters_HT: torch.Tensor
    directories_SA3: torch.Tensor

    @classmethod
    def of(cls, whole: torch.Tensor, rows: tuple[int, int], shape: tuple[int, int]) -> _Buffer:
        end = 1 + rows[0] * rows[1]
        return cls(whole, whole[:1], whole[1:end].view(rows), whole[end:].view(*shape, DIRECTORY_INTS))


class StepTables:
    """adapters_HT: int32, by SIGNS each row's place in the directories, or -1; live: int32 [1], whether a row has one.

    One thread, one stream of the engine's.
    """

    def __init__(
        self, sites: Sequence[Site], max_rows: int, max_adapters: int, device: torch.device, merged: bool = False
    ) -> None:
        """Begin with rows that need nothing. `merged`: an adapter is in the base weights."""
        self._sites = {site: index for index, site in enumerate(sites)}
        rows, shape = (1 + merged, max_rows), (len(sites), max_adapters)
        numbers = 1 + rows[0] * max_rows + len(sites) * max_adapters * DIRECTORY_INTS
        whole = torch.zeros(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = _Buffer.of(whole, rows, shape)
        self._host.adapters_HT[:] = NOBODY
        self._device = _Buffer.of(whole.to(device, copy=True), rows, shape)
        self.live, self.adapters_HT = self._device.live, self._device.adapters_HT
        self._places: dict[int, int] = {}  # by handle
        self._listed = False  # there are places that the device does not know yet
        self._used = 0  # rows up to which one may have an adapter
        self._copied: torch.cuda.Event | None = None

    def directory(self, site: Site) -> torch.Tensor:
        """Return int32 [A, 3]: (handle, 0, 1), or (handle, 0, 0) without a delta there; see kernels_cuda.routing."""
        return self._device.directories_SA3[self._sites[site]]

    def adapters_at(self, pass_rows_T: torch.Tensor | None) -> torch.Tensor:
        """Return each row's places in the directories at a site, [H, T]; `pass_rows_T`: see Batch.at. Never waits."""
        if pass_rows_T is None:
            return self.adapters_HT
        return torch.where(pass_rows_T < 0, NOBODY, self.adapters_HT[:, pass_rows_T.clamp(min=0)])

    def forget(self) -> None:
        """Forget the handles: from now on they mean other adapters."""
        self._places.clear()

    def write(self, batch: Batch | None) -> None:
        """Write the rows of the pass that is queued next on torch's current stream; None: all are the base model's.

        Raises ConfigError for too many rows or adapters, and for rows with several adapters.
        """
        if batch is None and not self._used:
            return
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one reads what is written here
        self._host.adapters_HT[:, : self._used] = NOBODY
        used = 0
        if batch is not None:
            self._list(batch.held)
            used = self._place(batch)
        self._host.live[0] = int(used > 0)
        *full, last = self._host.adapters_HT
        end = self._host.whole.numel() if self._listed else 1 + len(full) * len(last) + max(used, self._used)
        self._device.whole[:end].copy_(self._host.whole[:end], non_blocking=True)
        self._used, self._listed = used, False
        if self.live.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _list(self, held: Sequence[Held]) -> None:
        """Give places to adapters that have none."""
        most = self._host.directories_SA3.shape[1]
        if len(held) > most:
            raise ConfigError(f"got {len(held)} adapters in one step, expected at most {most}")
        new = [one for one in held if one.handle not in self._places]
        if not new:
            return
        self._listed = True
        here = {one.handle for one in held}
        self._places = {handle: place for handle, place in self._places.items() if handle in here}
        free = sorted(set(range(most)) - set(self._places.values()))
        for one, place in zip(new, free, strict=False):
            self._places[one.handle] = place
            self._host.directories_SA3[:, place, 0] = one.handle
            acts_S = torch.tensor([site in one.sites for site in self._sites], dtype=torch.int32)
            self._host.directories_SA3[:, place, 2] = acts_S

    def _place(self, batch: Batch) -> int:
        """Write each row's places; return the end of the rows with an adapter."""
        tables, weights_R = self._host.adapters_HT, batch.weights_R
        parts: list[slice | torch.Tensor] = [slice(None)]
        if weights_R is not None:
            parts = [weights_R == sign for sign in SIGNS[: len(tables)]]
        if weights_R is not None and sum(len(batch.rows_R[part].unique()) for part in parts) < len(weights_R):
            raise ConfigError(
                "transports gpu and nvshmem: got rows with several adapters, or with one of another weight than 1, "
                "expected one adapter per row, and on merged weights the merged one with weight -1; use auto"
            )
        end = int(batch.rows_R.max()) + 1
        if end > tables.shape[1]:
            raise ConfigError(f"got a step of {end} rows or more, expected at most {tables.shape[1]}")
        handles, index_R = torch.unique_consecutive(batch.handles_R, return_inverse=True)
        places_R = torch.tensor([self._places[handle] for handle in handles.tolist()], dtype=torch.int32)[index_R]
        for table_T, part in zip(tables, parts, strict=False):
            table_T[batch.rows_R[part]] = places_R[part]
        return end
