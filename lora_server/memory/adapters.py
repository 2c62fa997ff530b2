"""Commands about a shard's adapters: register, load, keep and drop them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from lora_server.errors import AdapterLoadError, LoraServerError, UnknownAdapterError
from lora_server.memory.entry import AdapterEntry, Done, Reason, Source, Want
from lora_server.memory.loader import Loader
from lora_server.memory.lock import StoreLock
from lora_server.memory.planner import LoadPlanner
from lora_server.telemetry import NOTHING


class ShardAdapters:
    """Carries out commands on a shard's adapters. Thread-safe. Each `done` is called once, from any thread, with None
    or an error."""

    def __init__(self, lock: StoreLock, planner: LoadPlanner, loader: Loader, shard: int) -> None:
        self._lock, self._planner, self._loader, self._shard = lock, planner, loader, shard
        self._table, self._queue, self._claims = planner.table, planner.queue, planner.evictor.claims
        self._tier = planner.layers.tier

    def load(
        self,
        handle: int,
        source: Source,
        done: Done,
        eager: bool = True,
        size: int | None = None,
        asked: bool = False,
    ) -> None:
        """Register an adapter, or change the source of a registered one.

        Eager: load it, and evict others for it; `done` is called when all layers are READY. If active adapters leave no
        memory, `done` is called at once and the load is deferred. Not eager: `done` is called when the files were
        measured; `prewarm`, or any demand, loads the adapter. `asked`: a request waits for that, so it comes before
        others, and files that this node lacks are fetched; without, these are not measured. `size`: the bytes of device
        pool that it takes; with it the files are not measured, unless `asked` has them fetched.
        """
        with self._lock:
            entry = self._table.entries.get(handle)
            if entry is None:
                try:
                    self._tier.know(handle)
                except AdapterLoadError as error:
                    self._lock.owe((done, error))
                    return
                entry = self._table.add(handle, source)
                if size is not None and not (asked and self._planner.remote.lacks(source)):
                    entry.footprint.size = entry.footprint.nbytes = size
                self._activate(entry)
            elif entry.source.version != source.version:
                self._lock.owe(
                    (done, AdapterLoadError(f"handle {handle}: has version {entry.source.version[:12]} here already"))
                )
                return
            entry.source = source
            self._retry(entry)
            self._table.note(entry)
            skips_measure = not asked and self._planner.remote.lacks(source)  # nothing is fetched without a demand
            known = entry.footprint.size is not None or skips_measure
            if entry.is_settled() or (known and not eager):
                self._lock.owe((done, entry.failure.error if entry.failure is not None else None))
            elif eager:
                self._want(entry, Want(Reason.ADD, done, done=done))
            else:
                self._measure(entry, done, asked)

    def prewarm(self, handle: int, done: Done) -> None:
        """Reserve free device memory for an adapter, and load it while there is no demand; any demand may evict it.

        `done` is called when all layers are READY, or when they will not be: the handle is unknown, the files are
        remote or not measured, there is no free memory, or the adapter was evicted.
        """
        with self._lock:
            entry = self._table.entries.get(handle)
            if entry is None or entry.footprint.size is None or entry.is_settled():
                self._lock.owe((done, None))
                return
            is_remote = self._planner.remote.lacks(entry.source)
            if not is_remote and self._planner.evictor.reserve_free(entry, time.monotonic()):
                earlier = entry.wants.get(Reason.PREWARM)
                if earlier is not None and earlier.done is not None:
                    self._lock.owe((earlier.done, None))
                self._want(entry, Want(Reason.PREWARM, Reason.PREWARM, done=done))
                return
            self._lock.owe((done, None))
            if not is_remote:  # report it after the answer, too: the controller counts on memory that is not free
                self._lock.owe((lambda _: self._note(entry), None))

    def keep_resident(self, handle: int, done: Done) -> None:
        """Load an adapter, and do not evict it until `allow_eviction` (`adapters pin`). `done`: see an eager `load`.

        Fails with AdapterLoadError, and changes nothing, if it does not fit together with the pinned adapters.
        """

        def measured(error: LoraServerError | None) -> None:
            if error is None:
                self.keep_resident(handle, done)
            else:
                done(error)

        with self._lock:
            entry = self._table.entries.get(handle)
            if entry is None:
                self._lock.owe(
                    (
                        done,
                        UnknownAdapterError(f"shard {self._shard}: handle {handle} is unknown here; was it removed?"),
                    )
                )
                return
            self._retry(entry)
            if entry.failure is not None:
                self._lock.owe((done, entry.failure.error))
                return
            if entry.footprint.size is None:
                self._measure(entry, measured, asked=True)
                return
            try:
                self._claims.check_pin(entry)
            except AdapterLoadError as error:
                self._lock.owe((done, error))
                return
            self._claims.pinned.add(entry)
            if entry.is_complete():
                self._lock.owe((done, None))
            else:
                self._want(entry, Want(Reason.PIN, done, done=done))

    def allow_eviction(self, handle: int) -> None:
        """End `keep_resident`. Unknown handles are ignored."""
        with self._lock:
            self._claims.pinned.difference_update(self._table.among([handle]))
            self._lock.notify()

    def relocate(self, handle: int, source: Source) -> None:
        """Note that the same content is in other files. Unknown handles, and other content, are ignored."""
        with self._lock:
            entry = self._table.entries.get(handle)
            if entry is not None and entry.source.version == source.version:
                entry.source = source

    def note_disk(self, versions: frozenset[str]) -> None:
        """Note which versions the node's disk cache has."""
        with self._lock:
            changed = self._planner.remote.note_disk(versions)
            for entry in self._table.entries.values() if changed else ():
                if entry.source.remote and entry.source.version in changed:
                    self._table.note(entry)

    def drop(self, handle: int) -> None:
        """Forget an adapter; its memory is freed when no step reads it any more. Unknown handles are ignored.

        Each `done` that waits for it gets an AdapterLoadError.
        """
        with self._lock:
            entry = self._table.remove(handle)
            if entry is None:
                return
            self._tier.forget(handle)
            self._table.dropped[entry] = self._tier.withdraw(handle)
            self._table.complete.discard(handle)
            self._claims.pinned.discard(entry)
            self._claims.active.discard(handle)
            self._lock.owe(*self._queue.drop(entry))
            self._loader.reclaim()

    def set_active(
        self, more: Iterable[int], fewer: Iterable[int], anew: bool = False, trace: Mapping[str, str] = NOTHING
    ) -> None:
        """Update the handles that clients hold: add `more`, remove `fewer` (`anew`: all others). They are loaded, as a
        part of `trace`, and stay resident."""
        with self._lock:
            before = self._claims.active
            active = self._claims.active = (set() if anew else before - set(fewer)) | set(more)
            for entry in self._table.among(sorted(before ^ active)):  # in one order on all shards
                self._activate(entry, trace)
            if before - active:
                self._queue.resume()
            self._lock.notify()

    def _activate(self, entry: AdapterEntry, trace: Mapping[str, str] = NOTHING) -> None:
        if entry.handle in self._claims.active:
            self._retry(entry)
            self._table.note(entry)  # a client that waits for it is told, also of a failure that is still fresh
            self._want(entry, Want(Reason.ACTIVE, Reason.ACTIVE, trace=trace))
        else:
            entry.wants.pop(Reason.ACTIVE, None)

    def _note(self, entry: AdapterEntry) -> None:
        with self._lock:
            self._table.note(entry)

    def _retry(self, entry: AdapterEntry) -> None:
        if entry.retry(time.monotonic()):
            self._lock.owe(*self._queue.requeue(entry))

    def _measure(self, entry: AdapterEntry, done: Done, asked: bool) -> None:
        """Queue the entry to be measured. `asked`: a request or an operator waits, so that fetching its files is a
        demand."""
        reason = Reason.MEASURE
        if asked:
            reason = Reason.FETCH if self._planner.layers.lacks_files(entry) else Reason.ASKED
        self._want(entry, Want(reason, done, done=done))

    def _want(self, entry: AdapterEntry, want: Want) -> None:
        self._queue.add(entry, want)
        self._lock.notify()
