"""From an adapter's files to memory, a layer at a time. Packed once, when it first comes in; then copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kernels_cuda.ops import Pair
from lora_server.adapters import Weights, open_adapter, reopen
from lora_server.errors import AdapterLoadError
from lora_server.memory.entry import Entry, Files
from lora_server.memory.manifest import Manifest, Manifests
from lora_server.memory.pools import Extent
from lora_server.memory.tier import Tier
from lora_server.placement import Placement
from lora_server.sources.cache import Lease
from lora_server.spec import Site
from lora_server.timings import Timings


@dataclass
class Loader:
    """Used by the store's thread, and by others only to `close` an entry that the thread does not work on.

    `pause` waits; `give_way` waits until no step is there, at most so long, between two blocks: while a step runs, a
    second thread of this process would get in its way at each of its calls: for `patience_seconds`, and no less than a
    block took, so that steps that never end make loading twice as slow, or so. `link_gbps` slows copies to the device
    down to so many 10^9 bits a second, for tests and benches.
    """

    placement: Placement
    shard: int
    tier: Tier
    pause: Callable[[float], object]
    give_way: Callable[[float], object]
    manifests: Manifests
    link_gbps: float = 0.0
    patience_seconds: float = Timings.block_patience
    _open: dict[Entry, Weights] = field(default_factory=dict)
    _leases: dict[Entry, Lease] = field(default_factory=dict)

    def hold(self, entry: Entry, lease: Lease) -> None:
        """Its files, which came from far; until `close`."""
        self._leases[entry] = lease

    def lacks_files(self, entry: Entry) -> bool:
        """Whether they have to be fetched, or taken from the disk cache, first."""
        return bool(entry.source.remote) and entry not in self._leases and not entry.is_packed()

    def measure(self, entry: Entry) -> None:
        """Open the files: what it has here, and how large that is. Raises AdapterError."""
        outline = self._opened(entry).outline
        entry.manifest = self.manifests.get(outline.key)
        if entry.manifest is None:
            entry.manifest = Manifest(outline, self.placement, self.shard, entry.layers, self.tier.format)
            self.manifests.put(entry.manifest)
        entry.nbytes = entry.manifest.nbytes
        entry.size = self.tier.pool.size_of(entry.nbytes)

    def bring(self, entry: Entry, layer: int) -> int:
        """One layer to the device, by way of the host pool where it has memory there; returns its bytes."""
        manifest, device = entry.manifest, entry.device
        assert manifest is not None and device is not None
        begin, end = manifest.span(layer)
        began = time.monotonic()
        if entry.host is None:
            self._read(entry, manifest, layer, device)
        else:
            if layer not in entry.packed:
                self._read(entry, manifest, layer, entry.host)
                entry.packed.add(layer)
            began = time.monotonic()
            with self.tier.on_stream():
                device.copy(entry.host, begin, end)
        self.tier.synchronize()
        if self.link_gbps:
            self.pause(began + (end - begin) * 8e-9 / self.link_gbps - time.monotonic())
        if entry.is_packed():
            self.close(entry)
        return end - begin

    def close(self, entry: Entry) -> None:
        """Its files; nothing where they are closed."""
        adapter = self._open.pop(entry, None)
        if adapter is not None:
            adapter.close()
        lease = self._leases.pop(entry, None)
        if lease is not None:
            lease.close()

    def _read(self, entry: Entry, manifest: Manifest, layer: int, target: Extent) -> None:
        weights, device = self._opened(entry), self.tier.device
        for site, blocks in manifest.blocks(layer).items():
            for expert, placed in blocks.items():
                began = time.monotonic()
                with self.tier.on_stream():
                    target.write(
                        placed.begin, self.tier.format.pack(_pairs(weights, site, expert), placed.shape, device)
                    )
                self.give_way(max(self.patience_seconds, time.monotonic() - began))

    def _opened(self, entry: Entry) -> Weights:
        if entry not in self._open:
            lease = self._leases.get(entry)
            path = entry.source.path if lease is None else lease.path
            self._open[entry] = self._as_before(entry, path) or self._anew(entry, path)
        return self._open[entry]

    def _as_before(self, entry: Entry, path: Path) -> Weights | None:
        """From what is known of its files, where nobody touched them since."""
        files = entry.files
        manifest = self.manifests.get(files.outline) if files is not None and files.path == path else None
        if files is None or manifest is None:
            return None
        return reopen(path, self.placement.spec, manifest.outline, files.seen, files.stamp)

    def _anew(self, entry: Entry, path: Path) -> Weights:
        """The adapter that was registered; files touched since are read whole and must have the same content.

        The disk cache answers for what came from far.
        """
        source = entry.source
        adapter = open_adapter(path, self.placement.spec)
        if not source.remote and adapter.stamp != source.stamp and adapter.version() != source.version:
            adapter.close()
            raise AdapterLoadError(
                f"{path}: its content changed since it was registered (version {source.version[:12]}); "
                "remove it and add it again"
            )
        entry.files = Files(path, adapter.seen, adapter.stamp, adapter.outline.key)
        return adapter


def _pairs(weights: Weights, site: Site, expert: int) -> list[Pair]:
    return [Pair(a_RK, b_OR, part.scale, part.out_begin) for part, a_RK, b_OR in weights.read(site, expert)]
