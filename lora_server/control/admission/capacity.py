"""Capacity of the shards' device pools: which adapters have a place in them, and which others fit as well."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from lora_server.control.sync.sizes import NO_LIMIT, UNMEASURED, PoolSizes
from lora_server.errors import AdapterLoadError
from lora_server.units import size


class PoolCapacity:
    """`most` adapters may be active together, 0: as many as fit. Not thread-safe: `AdmissionService` has the lock."""

    def __init__(self, most: int = 0, sizes: PoolSizes | None = None) -> None:
        self.most, self.sizes = most, PoolSizes() if sizes is None else sizes
        self.active: set[int] = set()  # handles that have a place: in use, or pinned
        self.pinned: frozenset[int] = frozenset()
        self.in_use: Set[int] = set()
        self._pins: set[int] = set()  # that changed since `set_in_use`
        self._used, self._summed = self.sizes.taken(()), self.sizes.changes  # of the active; with which `changes`

    def set_in_use(self, in_use: Set[int], moved: Set[int]) -> tuple[set[int], set[int]]:
        """Give the adapters in use and the pinned ones a place; return the handles that gained one, and that lost it.

        `moved`: those that came into use, or went out of it, since the last call.
        """
        self.in_use = in_use
        moved, self._pins = moved | self._pins, set()
        entitled = {handle for handle in moved if handle in in_use or handle in self.pinned}
        more, fewer = entitled - self.active, {handle for handle in moved - entitled if handle in self.active}
        self._change(more, fewer)
        return more, fewer

    def set_pinned(self, pinned: frozenset[int]) -> None:
        """Set which adapters are pinned; `set_in_use` gives them a place."""
        self._pins |= pinned ^ self.pinned
        self.pinned = pinned

    def _change(self, more: Set[int], fewer: Set[int]) -> None:
        if self.is_current and (more or fewer):
            self._used += self.sizes.taken(more) - self.sizes.taken(fewer)
        self.active |= more
        self.active -= fewer

    def forget(self, handle: int) -> None:
        """Remove an adapter, while its sizes are still known."""
        self.pinned -= {handle}
        self._change(set(), self.active & {handle})

    def check(self, names: Sequence[str], handles: Set[int]) -> None:
        """Raise AdapterLoadError where these can never have places together."""
        if reason := self.too_large(handles):
            raise AdapterLoadError(
                f"adapters {list(names)}: {reason}; put fewer adapters into a batch, or start the server with a larger "
                "--device-pool or more shards"
            )

    def too_large(self, handles: Set[int]) -> str:
        """Return why these can never have places together; empty where they can."""
        if self.most and len(handles) > self.most:
            return f"{len(handles)} adapters together are more than --max-active-adapters {self.most}"
        limits, taken, beside = self.sizes.limits(), self.sizes.taken(handles), self.sizes.taken(self.pinned - handles)
        over = taken + beside > limits
        if not over.any():
            return ""
        shard = over.argmax()
        pinned = f", of which {beside[shard]} are pinned" if beside[shard] else ""
        return f"{taken[shard]} bytes are needed together on shard {shard}, and its pool has {limits[shard]}{pinned}"

    def move_to(self, sizes: PoolSizes) -> None:
        """Count by the pools of other shards from now on."""
        self.sizes, self._summed = sizes, -1
        self._add_up()

    def takes_place(self, handles: Set[int]) -> bool:
        """Return whether these fit, and are measured, and not all of them are in use."""
        return not handles <= self.in_use and self.sizes.unmeasured(handles) is None and not self.lacking(handles)

    def answerable(self, handles: Sequence[int]) -> list[bool]:
        """Return for each adapter whether a ticket for it alone can be answered: it has a place, or there is one, or
        there can never be one: what `too_large`, `unmeasured` and `lacking` say of one, by one look at arrays."""
        if self.is_taken:
            return [handle in self.in_use for handle in handles]
        self._add_up()
        limits, taken = self.sizes.limits(), self.sizes.each(handles)
        needed, beside = np.maximum(taken, 0), self.sizes.taken(self.pinned)
        is_measured = ((taken != UNMEASURED) | (limits == NO_LIMIT)).all(axis=1)
        is_active, is_pinned = (_among(handles, some) for some in (self.active, self.pinned))
        fits = (self._used + needed <= limits).all(axis=1) | is_active
        never = (beside + needed * ~is_pinned[:, None] > limits).any(axis=1)
        found: list[bool] = (never | (is_measured & fits)).tolist()
        return found

    def lacking(self, handles: Set[int], without: Set[int] = frozenset()) -> str:
        """Return why there is no place for these beside the active ones, or beside those that are left without some
        that are in use; empty where there is."""
        in_use, gone = self.in_use - without if without else self.in_use, without - self.pinned
        if self.most and len(in_use) + len(handles - in_use) > self.most and not handles <= in_use:
            return f"{len(in_use)} adapters are in use, and --max-active-adapters is {self.most}"
        new = {handle for handle in handles if handle in gone or handle not in self.active}
        if not new:
            return ""
        self._add_up()
        limits, taken, used = self.sizes.limits(), self.sizes.taken(new), self._used - self.sizes.taken(gone)
        over = used + taken > limits
        if not over.any():
            return ""
        shard = over.argmax()
        free = int(max(0, limits[shard] - used[shard]))
        return (
            f"shard {shard}'s pool of {size(int(limits[shard]))} has {size(free)} beside the {len(self.active)} "
            f"adapters that are in use or pinned, {size(int(taken[shard]))} are needed"
        )

    @property
    def is_taken(self) -> bool:
        """Whether as many adapters are in use as may be."""
        return 0 < self.most <= len(self.in_use)

    @property
    def is_current(self) -> bool:
        """Whether no size has changed since `lacking` last looked."""
        return self.sizes.changes == self._summed

    def _add_up(self) -> None:
        """Add up what the active adapters take again, where a size has changed."""
        if not self.is_current:
            self._summed, self._used = self.sizes.changes, self.sizes.taken(self.active)


def _among(handles: Sequence[int], some: Set[int]) -> npt.NDArray[np.bool_]:
    return np.fromiter((handle in some for handle in handles), dtype=bool, count=len(handles))
