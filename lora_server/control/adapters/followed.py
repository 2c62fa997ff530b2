"""Adapters that come from a followed directory: taken, replaced and forgotten as their files are; see `watch`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import structlog

from lora_server.adapters import Adapter, stamp_of, validate_adapter
from lora_server.control.adapters.adapters import described
from lora_server.control.adapters.origins import local, uri_of
from lora_server.control.adapters.readings import Readings
from lora_server.control.adapters.reconciled import ReconciledAdapters
from lora_server.control.adapters.registry import Record, check_name, version_of
from lora_server.errors import AdapterError, AdapterExistsError
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class FollowedAdapters(ReconciledAdapters):
    """A name is the directory's where its record's `uri` lies there; what was added by hand is never touched."""

    def judged(self, directory: Path) -> dict[str, str]:
        """By name, the stamp of what was last served, refused or removed of a directory; empty for one unseen."""
        here = uri_of(directory)
        with self._lock:
            of = {one.name: one.found for one in self._registry.listed() if one.uri == f"{here}/{one.name}"}
            return of | {one.name: one.stamp for one in self._refusals.all() if one.uri == f"{here}/{one.name}"}

    def follow(self, name: str, where: Path, stamp: str) -> None:
        """Serve what lies in a followed directory: earlier content until every shard has the new, which is validated
        before. What is refused is listed with the reason. No-op where the files are being changed.

        Raises ServerUnavailableError, ShardUnavailableError: try again.
        """
        self._shards.require_up()
        try:
            check_name(name)
            served = self._check_found_here(name, where)
            if served is None and (record := self._readings.before(where, stamp)) is not None:
                self._take_as_before(name, where, record)
                return
            adapter, version = validate_adapter(Path(os.path.realpath(where)), self._spec)
            with adapter:
                if _is_unchanged(where, stamp):
                    self._take(name, where, stamp, adapter, version)
        except (AdapterError, OSError) as error:
            if _is_unchanged(where, stamp):
                self._refuse(name, where, error, stamp)

    def _check_found_here(self, name: str, where: Path) -> Record | None:
        served = self._registry.find(name)
        if served is not None and served.uri != uri_of(where):
            raise AdapterExistsError(
                f"adapter {name!r}: the name was given to {served.uri} by hand; for the directory's remove it, "
                f"then lora-server adapters add {name} {where}"
            )
        return served

    def _take(self, name: str, where: Path, stamp: str, adapter: Adapter, version: str) -> None:
        with self._changing:
            served = self._means(name, where)
            if served is not None and served.version == version:
                self._touched(served, adapter, stamp)
                return
            record = self._record(name, local(where, adapter, version), stamp, of_directory=True)
            self._readings.note(record)
            if served is None:
                self._come(record)
            else:
                with self._lock:
                    loads = self._load_beside(record)
        for warning in record.warnings:
            log.warning("adapter", name=name, warning=warning)
        if served is not None:
            with contextlib.suppress(AdapterExistsError):  # it was removed meanwhile
                self._replace(served, record, loads, self._timings.replace)

    def _means(self, name: str, where: Path) -> Record | None:
        """What comes to a followed directory may have this name; what the name means as yet."""
        self._registry.prepare()
        with self._lock:
            self._require_settled()
            served = self._check_found_here(name, where)
            if served is None:
                self._check_not_a_base_models(name)
        return served

    def _come(self, record: Record) -> None:
        self._offer(replace(record, pinned=record.uri in self._readings.pinned()), eager=False)
        log.info("adapter registered", **described(record))

    def _take_as_before(self, name: str, where: Path, record: Record) -> None:
        with self._changing:
            if self._means(name, where) is None:
                self._come(replace(record, name=name, handle=self._registry.next_handle()))

    @cached_property
    def _readings(self) -> Readings:
        return Readings(self._ledger, self._spec_digest)

    def keep_readings(self) -> None:
        """So that the next server need not read what nobody touches."""
        with self._changing:  # nobody pins meanwhile
            self._readings.keep()

    def _touched(self, served: Record, adapter: Adapter, stamp: str) -> None:
        """The same content, in other files or elsewhere."""
        path, warnings = str(adapter.path), adapter.warnings
        record = replace(served, path=path, stamp=adapter.stamp, warnings=warnings, found=stamp)
        if self._ledger is not None and not record.of_directory:
            self._ledger.rewrite(version_of(record))
        if record.of_directory:
            self._readings.note(record)
        with self._lock:
            self._registry.update(record)
            self._take_back_refusal(record.name)
            self._shards.broadcast(pb.ShardCommand(note=self._load(record)))

    def forget(self, directory: Path, names: Iterable[str]) -> None:
        """They are gone from a followed directory: so are their refusals, and what was served from there."""
        with self._changing:
            for name in names:
                served = self._registry.find(name)
                if served is not None and served.uri == uri_of(directory / name):
                    self._forget(served)
                    with self._lock:
                        self._unlist(served, why=f"{served.uri} is gone")
                with self._lock:
                    self._refusals.pop(name)
            with self._lock:
                self._collect()


def _is_unchanged(where: Path, stamp: str) -> bool:
    try:
        return stamp_of(where) == stamp
    except OSError:  # the next scan says it
        return False
