"""The adapter weights of one shard: known, brought in, pinned by steps, evicted, dropped."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_server.errors import AdapterLoadError, LoraServerError, ProtocolError, UnknownAdapterError
from lora_server.memory.entry import Done, Entry, Source, State
from lora_server.memory.filling import Filling
from lora_server.memory.use import MemoryUse, Residency
from lora_server.spec import Site
from lora_server.telemetry import NOTHING


class WeightStore(Filling):
    """Thread-safe. `on_layer(handle, layers ready)` is called by its thread after each layer, and after a failure."""

    # -- adapters

    def load(self, handle: int, source: Source, done: Done, eager: bool = True, size: int | None = None) -> None:
        """Know an adapter from now on; `done` is called once, from any thread.

        Eager: it is brought in, others make room, and `done` comes when all of it is READY; where active ones leave no
        room, it comes when that is known, and the adapter follows when they do. Otherwise `done` comes when its files
        were looked at; it is brought in by `bring`, or when somebody asks. `size`: what it took of the device pool of
        an earlier process of this shard, so that its files need no look.
        """
        with self._changed:
            entry = self._entries.get(handle)
            again = entry is not None
            if entry is None:
                try:
                    self.tier.know(handle)
                except AdapterLoadError as error:
                    done(error)
                    return
                self._orders += 1
                entry = self._entries[handle] = Entry(handle, source, self._layers, self._orders)
                entry.far = self._is_far(entry)
                if size is not None:
                    entry.size = entry.nbytes = size
                self._note_active(entry)
            elif entry.source.version != source.version:
                done(AdapterLoadError(f"handle {handle}: has version {entry.source.version[:12]} here already"))
                return
            else:  # said anew, by another controller
                entry.source, entry.far = source, self._is_far(entry)
            entry.retry(time.monotonic(), self._timings.load_retry)
            self._moved.add(handle)
            known = entry.size is not None or (entry.far and not again)  # nothing is fetched before somebody asks
            if entry.failure is not None or entry.is_whole() or (known and not eager):
                done(entry.failure)
                return
            if eager:
                entry.eager = True
                entry.waiting.append(done)
                self._want(entry)
            else:
                entry.looking.append(done)
                self._look_at(entry, again)

    def bring(self, handle: int, done: Done) -> None:
        """Unasked: it takes its memory at once, where nobody has to make room, and is loaded when nobody waits; others
        may take it back. `done` comes when all of it is READY, or it does not come; unknown handles do not, nor what is
        not looked at yet, or far."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is None or entry.size is None or entry.failure is not None or entry.far or entry.is_whole():
                done(None)
            elif self._room.take(entry, time.monotonic()):
                self._turns.bring(entry, done)
                self._changed.notify()
            else:  # reported again after the answer: the controller counts other memory as free than there is
                done(None)
                self._moved.add(handle)

    def keep(self, handle: int, done: Done) -> None:
        """Bring an adapter in, and let it never make room until `unkeep`; `done` is called as by an eager `load`.

        AdapterLoadError, and nothing changed, where all that are kept do not fit together.
        """

        def looked(error: LoraServerError | None) -> None:
            if error is None:
                self.keep(handle, done)
            else:
                done(error)

        with self._changed:
            entry = self._entries.get(handle)
            if entry is None:
                done(UnknownAdapterError(f"shard {self._shard}: handle {handle} is unknown here; was it removed?"))
                return
            entry.retry(time.monotonic(), self._timings.load_retry)
            if entry.failure is not None:
                done(entry.failure)
                return
            if entry.size is None:
                entry.looking.append(looked)
                self._look_at(entry)
                return
            try:
                self._room.check_kept(entry)
            except AdapterLoadError as error:
                done(error)
                return
            entry.stays = True
            self._room.kept.add(entry)
            if entry.is_whole():
                done(None)
            else:
                entry.waiting.append(done)
                self._want(entry)

    def unkeep(self, handle: int) -> None:
        """It makes room as others do. Unknown handles are ignored."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is not None and entry.stays:
                entry.stays = False
                self._room.kept.discard(entry)
                self._changed.notify()

    def relocate(self, handle: int, source: Source) -> None:
        """The same content lies elsewhere, or in other files. Unknown handles, and other content, are ignored."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is not None and entry.source.version == source.version:
                entry.source, entry.far = source, self._is_far(entry)

    def note_disk(self, versions: frozenset[str]) -> None:
        """The disk cache has these, and no others."""
        with self._changed:
            if versions == self._on_disk:
                return
            self._on_disk = versions
            for entry in self._entries.values():
                if entry.far != self._is_far(entry):
                    entry.far = not entry.far
                    self._moved.add(entry.handle)

    def drop(self, handle: int) -> None:
        """Forget an adapter; its memory is free when no step reads it any more. Unknown handles are ignored.

        Whoever waits for it gets an AdapterLoadError.
        """
        with self._changed:
            entry = self._entries.pop(handle, None)
            if entry is None:
                return
            self.tier.forget(handle)
            entry.dropped, entry.withdrawn = True, self.tier.withdraw(handle)
            self._turns.drop(entry)
            self._whole.discard(handle)
            self._dropped.add(entry)
            self._room.kept.discard(entry)
            self._room.active.discard(handle)
            self._free_if_dropped(entry)
            waiting, entry.waiting, entry.looking = entry.waiting + entry.looking, [], []
        for done in waiting:
            done(AdapterLoadError(f"handle {handle}: dropped while it loaded"))

    def set_active(
        self, more: Iterable[int], fewer: Iterable[int], anew: bool = False, trace: Mapping[str, str] = NOTHING
    ) -> None:
        """Which handles clients hold: these too, or with `anew` only these. They are brought in, as a part of `trace`,
        and stay."""
        with self._changed:
            before = self._room.active
            active = self._room.active = (set() if anew else before - set(fewer)) | set(more)
            for handle in before ^ active:
                if handle in self._entries:
                    self._entries[handle].trace = trace if handle in active else NOTHING
                    self._note_active(self._entries[handle])
            if before - active:
                self._turns.resume()
            self._changed.notify()

    # -- steps

    def pin(self, handles: Collection[int], layer: int, owner: Hashable, deadline: float) -> int | None:
        """Keep these adapters where they are until `unpin`; None where one is not READY, which is then demanded.

        deadline: time.monotonic(). Those that are unknown or FAILED keep nobody waiting: `gather` refuses them. Raises
        AdapterLoadError where all of them together do not fit.
        """
        with self._changed:
            if not self._whole.issuperset(handles) and not self._have(handles, layer, owner, deadline):
                return None
            self._turns.withdraw(owner, handles)
            return self._pins.add(handles, time.monotonic())

    def unpin(self, pin: int) -> None:
        """The step was answered."""
        with self._changed:
            self._pins.remove(pin)
            for entry in list(self._dropped):
                self._free_if_dropped(entry)
            if self._starved:
                self._changed.notify()

    def prefetch(self, handles: Iterable[int], owner: Hashable, deadline: float) -> None:
        """These will be needed then, at the first layer. Unknown handles are ignored."""
        with self._changed:
            known = [entry for handle in handles if (entry := self._entries.get(handle)) is not None]
            self._turns.demand(known, None, owner, deadline)
            self._changed.notify()

    def forget(self, owner: Hashable, but: Collection[int] = ()) -> None:
        """Whoever demanded something needs it no more, but for these handles."""
        with self._changed:
            self._turns.withdraw(owner, but=but)
            self._changed.notify()

    def known(self, handles: Iterable[int]) -> frozenset[int]:
        """Those of these that are adapters."""
        return frozenset(handle for handle in handles if handle in self._entries)

    def missing(self, handles: Iterable[int], layer: int) -> int | None:
        """One of these that a step of the layer has to wait for."""
        entries = (self._entries.get(handle) for handle in handles)
        return next((entry.handle for entry in entries if entry is not None and entry.lacks(layer)), None)

    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], where: str) -> Any:
        """The weights of a step, for what it pinned; see Tier.gather. `where` names the step in errors: why loading
        FAILED, UnknownAdapterError for what is not READY, ProtocolError for what another shard owns."""

        def refusal(handle: int, expert: int) -> LoraServerError:
            entry = self._entries.get(handle)
            state = State.UNKNOWN if entry is None else entry.state(site.layer)
            if entry is not None and entry.failure is not None and state is State.FAILED:
                return entry.failure
            if state is State.READY:
                return ProtocolError(
                    f"{site} expert {expert}: not on shard {self._shard}; placements differ, join again"
                )
            return UnknownAdapterError(
                f"shard {self._shard} {where}: handle {handle} is {state.value} here; was it removed?"
            )

        return self.tier.gather(site, segments_S4, refusal)

    # -- what there is

    def state(self, handle: int, layer: int) -> State:
        """Where a layer stands."""
        entry = self._entries.get(handle)
        return State.UNKNOWN if entry is None else entry.state(layer)

    def error(self, handle: int) -> LoraServerError:
        """Why a handle is FAILED."""
        entry = self._entries.get(handle)
        failure = entry.failure if entry is not None else None
        return failure or AdapterLoadError(f"handle {handle}: not failed")

    def layers_ready(self, handle: int) -> int:
        """How many of its layers are; 0 for one that is unknown."""
        entry = self._entries.get(handle)
        return len(entry.ready) if entry is not None else 0

    def moved(self) -> list[Residency]:
        """Adapters that came or went since the last call."""
        with self._changed:
            moved, self._moved = self._moved, set()
            entries = [self._entries[handle] for handle in moved if handle in self._entries]
            return [Residency.of(entry, self._turns.is_coming(entry)) for entry in entries]

    def use(self) -> MemoryUse:
        """What the pools hold."""
        with self._changed:
            self._room.note_uses()
        device, host = self.tier.pool, self._room.host_pool
        return MemoryUse(
            device.used,
            device.free,
            device.capacity,
            host.used if host else 0,
            host.capacity if host else 0,
            self._loads,
            self._loaded_bytes,
            self._room.evictions,
            self._preload.preloads,
            self._preload.hits,
        )

    def check_integrity(self) -> None:
        """When idle: every byte of the pools is free or an adapter's, once. Raises AssertionError."""
        with self._changed:
            self._room.check_integrity()

    def close(self) -> None:
        """Drop everything and stop."""
        self._stop()
        for handle in list(self._entries):
            self.drop(handle)
        self._thread.join()

    def _have(self, handles: Iterable[int], layer: int, owner: Hashable, deadline: float) -> bool:
        """Whether a step can be served; otherwise what it lacks is demanded."""
        entries, now = [one for handle in handles if (one := self._entries.get(handle)) is not None], time.monotonic()
        for entry in entries:
            entry.retry(time.monotonic(), self._timings.load_retry)
        if any(entry.lacks(layer) for entry in entries):
            self._room.check_fit(entries, self._room.kept)
            self._turns.demand(entries, layer, owner, deadline)
            self._changed.notify()
            return False
        for entry in entries:
            entry.in_part = None if entry.is_whole() or entry.failure is not None else now
        return True

    def _look_at(self, entry: Entry, soon: bool = False) -> None:
        """At its files, which may have to come first."""
        if self._loader.lacks_files(entry):
            self._want(entry)
            return
        self._turns.look(entry, soon)
        self._changed.notify()

    def _note_active(self, entry: Entry) -> None:
        entry.active = entry.handle in self._room.active
        if entry.active and not entry.is_whole() and entry.failure is None:
            self._want(entry)
