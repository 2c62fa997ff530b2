"""Load an adapter's layers from its files: packed when they first come in, and copied from the host pool after that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lora_server.adapters import Weights, open_adapter, reopen
from lora_server.errors import AdapterLoadError
from lora_server.memory.entry import AdapterEntry, Files
from lora_server.memory.manifest import Manifest, Manifests
from lora_server.memory.pools import Extent
from lora_server.memory.tier import Tier
from lora_server.placement import Placement
from lora_server.sources.cache import Lease
from lora_server.timings import Timings


@dataclass
class LayerLoader:
    """Reads files and fills extents. Used by the loader's thread; others may only `close` an entry that it is not
    working on, and `hold`.

    `pause(seconds)` waits, for `link_gbps`: tests and benches slow copies to the device down to 10^9 bits a second.
    `yield_to_steps(seconds)` waits until no step is pinned, between two blocks, because a second thread of this process
    slows each call of a step down. It waits `patience_seconds`, or as long as the block took: steps without a pause
    make loading about twice as slow.
    """

    placement: Placement
    shard: int
    tier: Tier
    pause: Callable[[float], object]
    yield_to_steps: Callable[[float], object]
    manifests: Manifests
    link_gbps: float = 0.0
    patience_seconds: float = Timings.block_patience
    _open: dict[AdapterEntry, Weights] = field(default_factory=dict)
    _leases: dict[AdapterEntry, Lease] = field(default_factory=dict)

    def hold(self, entry: AdapterEntry, lease: Lease) -> None:
        """Keep fetched files in the disk cache until `close`."""
        self._leases[entry] = lease

    def lacks_files(self, entry: AdapterEntry) -> bool:
        """Return whether its files have to be fetched, or leased from the disk cache, first."""
        return bool(entry.source.remote) and entry not in self._leases and not entry.is_packed()

    def measure(self, entry: AdapterEntry) -> None:
        """Open the files, and set the entry's footprint. Raises AdapterError."""
        outline, footprint = self._opened(entry).outline, entry.footprint
        footprint.manifest = self.manifests.get(outline.key)
        if footprint.manifest is None:
            footprint.manifest = Manifest(outline, self.placement, self.shard, entry.layers, self.tier.format)
            self.manifests.put(footprint.manifest)
        footprint.nbytes = footprint.manifest.nbytes
        footprint.size = self.tier.pool.size_of(footprint.nbytes)

    def load(self, entry: AdapterEntry, layer: int) -> int:
        """Load one layer to the device, through the host pool where the entry has memory there; returns its bytes."""
        manifest, copies = entry.footprint.manifest, entry.copies
        assert manifest is not None and copies.device is not None
        begin, end = manifest.span(layer)
        began = time.monotonic()
        if copies.host is None:
            self._read(entry, manifest, layer, copies.device)
        else:
            if layer not in copies.packed:
                self._read(entry, manifest, layer, copies.host)
                copies.packed.add(layer)
            began = time.monotonic()
            with self.tier.on_stream():
                copies.device.copy(copies.host, begin, end)
        self.tier.synchronize()
        if self.link_gbps:
            self.pause(began + (end - begin) * 8e-9 / self.link_gbps - time.monotonic())
        if entry.is_packed():
            self.close(entry)
        return end - begin

    def close(self, entry: AdapterEntry) -> None:
        """Close the entry's files, and give back their lease. Idempotent."""
        for held in (self._open.pop(entry, None), self._leases.pop(entry, None)):
            if held is not None:
                held.close()

    def _read(self, entry: AdapterEntry, manifest: Manifest, layer: int, target: Extent) -> None:
        weights = self._opened(entry)
        for site, blocks in manifest.blocks(layer).items():
            for expert, placed in blocks.items():
                began = time.monotonic()
                self.tier.read(weights, site, expert, target, placed)
                self.yield_to_steps(max(self.patience_seconds, time.monotonic() - began))
        weights.check()

    def _opened(self, entry: AdapterEntry) -> Weights:
        if entry not in self._open:
            lease = self._leases.get(entry)
            path, stamp = (entry.source.path, entry.source.stamp) if lease is None else (lease.path, lease.stamp)
            self._open[entry] = self._reopen(entry, path) or self._validate(entry, path, stamp)
        return self._open[entry]

    def _reopen(self, entry: AdapterEntry, path: Path) -> Weights | None:
        """Open files that were not touched since they were checked, without reading their headers."""
        files = entry.footprint.files
        manifest = self.manifests.get(files.outline) if files is not None and files.path == path else None
        if files is None or manifest is None:
            return None
        return reopen(path, self.placement.spec, manifest.outline, files.seen, files.stamp)

    def _validate(self, entry: AdapterEntry, path: Path, stamp: str) -> Weights:
        """Open and check the files. Those touched since `stamp` are hashed: the content must be the registered one."""
        source = entry.source
        adapter = open_adapter(path, self.placement.spec)
        if adapter.stamp != stamp and adapter.version() != source.version:
            adapter.close()
            raise AdapterLoadError(
                f"{path}: its content changed since it was registered (version {source.version[:12]}); "
                "remove it and add it again"
            )
        entry.footprint.files = Files(path, adapter.seen, adapter.stamp, adapter.outline.key)
        return adapter
