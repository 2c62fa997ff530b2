"""Adapters as the ledger has them, whoever changed it: an earlier controller, or another server of its database."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import structlog

from lora_server.control.adapters.registry import Record, record_of, version_of
from lora_server.control.adapters.updates import UpdatedAdapters
from lora_server.errors import AdapterError, LoraServerError
from lora_server.registry.versions import Version
from lora_server.sources.remote import is_remote

log = structlog.get_logger()


class ReconciledAdapters(UpdatedAdapters):
    """`reconcile` once, before the server is settled; `refresh` and `tidy` from one thread, again and again."""

    _changes = -1  # of the ledger, that were seen

    def reconcile(self, listed: Iterable[Version]) -> None:
        """Shards have said what they keep, and the ledger what names mean: the ledger is right. What it does not know
        drains, unless it is a directory's. One that was never written to, as the last went with its node, learns of
        them.
        """
        with self._lock:
            known = {one.handle: one for one in (*listed, *self._learn())}
            for record in self._registry.listed():
                if not record.of_directory and record.handle not in known:
                    self._registry.unlist(record.name)
                    self._relist(record.name)
            for one in known.values():
                self._gone.discard(one.handle)
                self._registry.make_listed(self._localized(record_of(one)))

    def _learn(self) -> list[Version]:
        if self._ledger is None or self._ledger.changes():
            return []
        learnt = [version_of(record) for record in self._registry.listed() if not record.of_directory]
        for one in learnt:
            self._ledger.list(one)
        return learnt

    def _relist(self, name: str) -> None:
        """A directory's, in whose place another was about to come."""
        told = self._told_listed - self._told_not
        for record in self._registry.records():
            if record.name == name and record.of_directory and record.handle in told:
                self._registry.make_listed(record)

    def _localized(self, record: Record) -> Record:
        """Its files as this server has them; shards look whether they are those that were registered."""
        copy = self._copies.find(record.version) if self._copies is not None else None
        if is_remote(record.path) or copy is not None:
            return record if copy is None or str(copy) == record.path else replace(record, path=str(copy))
        return record if Path(record.path).exists() else replace(record, path=os.path.realpath(record.uri))

    def refresh(self) -> None:
        """What other servers of the database changed since."""
        if self._ledger is None or (changes := self._ledger.changes()) == self._changes:
            return
        for one in self._ledger.listed():  # before anybody has to wait for it
            if self._registry.by_handle(one.handle) is None:
                self._copy(record_of(one))
        with self._changing:
            listed = self._ledger.listed()
            replaced = [one for one in listed if not self._follow_other(one)]
            self._unlist_others({one.name for one in listed})
        failed = [one.name for one in replaced if not self._replace_other(record_of(one))]
        deadlines = self._ledger.drains.deadlines()
        with self._lock:
            self._adopt_deadlines(deadlines)
        self._changes = self._changes if failed else changes

    def _follow_other(self, one: Version) -> bool:
        """False where it comes in another's place."""
        with self._lock:
            served, known = self._registry.find(one.name), self._registry.by_handle(one.handle)
            if served is None:
                self._offer(self._localized(record_of(one)), eager=False)
                log.info("adapter added by another server", name=one.name, version=one.version[:12])
            elif known is not None and self._registry.is_listed(known) and known.pinned != one.pinned:
                self._registry.update(replace(known, pinned=one.pinned))
                self._note(known)
                self._collect()
            return served is None or served.handle == one.handle or served.of_directory

    def _unlist_others(self, names: set[str]) -> None:
        with self._lock:
            for record in self._registry.listed():
                if not record.of_directory and record.name not in names:
                    self._unlist(record, why="another server removed it")
            self._collect()

    def _replace_other(self, record: Record) -> bool:
        """What is being loaded by an update of ours is not touched."""
        with self._changing, self._lock:
            served = self._registry.find(record.name)
            if served is None or self._registry.by_handle(record.handle) is not None:
                return True
            loads = self._load_beside(record := self._localized(record))
        try:
            self._replace(served, record, loads, self._timings.replace_other, keep=False)
        except LoraServerError as error:
            log.error("another server's version is not served", name=record.name, error=str(error))
            return False
        return True

    def _copy(self, record: Record) -> None:
        """One of our own, where it can be had."""
        record = self._localized(record)
        if self._copies is None or is_remote(record.path) or self._copies.find(record.version) is not None:
            return
        try:
            self._copies.take(Path(record.path), record.version)
            self._copies.done(record.version)
        except (AdapterError, OSError) as error:
            log.warning("no copy of another server's adapter", name=record.name, reason=str(error))

    def tidy(self) -> None:
        """Copies that no name means, or meant, and no client holds any more."""
        if self._copies is None or self._ledger is None or not self._untidy or not self._settled.is_set():
            return
        self._untidy = False
        kept = {one.version for one in self._ledger.all()}
        with self._lock:
            kept |= {one.version for one in self._registry.records()}
        self._copies.keep(kept)
