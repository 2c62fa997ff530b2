"""What a store says of itself."""

from __future__ import annotations

from typing import NamedTuple

from lora_server.memory.entry import Entry


class MemoryUse(NamedTuple):
    """Bytes of the device pool and of the host pool, and what has happened since the start."""

    weight_bytes: int
    free_bytes: int
    total_bytes: int
    host_bytes: int
    host_total_bytes: int
    loads: int  # of whole adapters
    loaded_bytes: int
    evictions: int
    preloads: int
    preload_hits: int


class Residency(NamedTuple):
    """How much of an adapter is where."""

    handle: int
    ready: int  # layers
    packed: int  # layers in the host pool
    nbytes: int  # that it takes of the device pool
    measured: bool  # its files were looked at: `nbytes` is true
    far: bool  # its files are not on this node's disk
    coming: bool  # somebody waits for it, or it is brought unasked

    @classmethod
    def of(cls, entry: Entry, coming: bool) -> Residency:
        """Now."""
        measured = entry.size is not None or entry.is_whole()
        return cls(entry.handle, len(entry.ready), len(entry.packed), entry.size or 0, measured, entry.far, coming)
