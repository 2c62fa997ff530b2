"""Where an adapter comes from: a directory of this host, or a URL whose files the disk cache brings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from lora_server.adapters import Adapter, open_adapter, validate_adapter
from lora_server.adapters.refusal import shown
from lora_server.errors import AdapterSourceError
from lora_server.sources.fetch import Fetcher
from lora_server.sources.remote import canonical, is_remote
from lora_server.spec import ModelSpec


class Origin(NamedTuple):
    """An adapter that was looked at whole. `path` and `stamp` are what shards open it by, see Record."""

    adapter: Adapter
    version: str
    uri: str
    path: str
    stamp: str


@contextlib.contextmanager
def opened(uri: str, spec: ModelSpec, fetcher: Fetcher | None, seconds: float) -> Iterator[Origin]:
    """Read the whole file; from far it has to come first, within `seconds`. Raises AdapterError."""
    if not is_remote(uri):
        where = local_path(uri)
        adapter, version = validate_adapter(Path(os.path.realpath(where)), spec)
        with adapter:
            yield local(where, adapter, version)
        return
    url = canonical(uri)
    if fetcher is None:
        raise AdapterSourceError(f"adapter source {url}: this controller has no disk cache, expected file:// or a path")
    with fetcher.fetch(url, seconds=seconds) as lease, open_adapter(lease.path, spec) as adapter:
        yield Origin(adapter, lease.version, url, url, "")


def local(where: Path, adapter: Adapter, version: str) -> Origin:
    """Of a directory, or of a link to one."""
    return Origin(adapter, version, uri_of(where), str(adapter.path), adapter.stamp)


def local_path(uri: str) -> Path:
    """The directory, or the link to one, that a path or a file:// URL names. Raises AdapterSourceError."""
    try:
        path = unquote(urlsplit(uri).path) if uri.lower().startswith("file://") else uri
    except ValueError:
        path = ""
    if not path or "\0" in path:
        raise AdapterSourceError(f"adapter source: got {shown(uri)}, expected a path, file:///PATH, or a URL")
    return Path(path).absolute()


def uri_of(where: Path) -> str:
    """One text for one place, whose last part may be a link."""
    return os.path.normpath(where)
