"""The sources that an adapter added by name may have: directories and URL prefixes that the operator allows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from lora_server.adapters.refusal import clip
from lora_server.adapters.scan import is_watched
from lora_server.config import ServeConfig
from lora_server.control.adapters.files import local_path
from lora_server.errors import AdapterSourceError
from lora_server.sources.urls import canonical, is_listed, is_remote, prefixes

NO_URL = "none"


class Allowed(NamedTuple):
    """Allowed sources. `roots`: resolved directories of this host; `sources`: URL prefixes, none to allow any URL."""

    roots: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ServeConfig) -> Allowed:
        """Return what the configuration allows. Without --adapter-root, that is the --adapters directory and, if the
        server listens on loopback only, its working directory unless that is the file system's root. Raises
        ConfigError."""
        roots = list(config.adapter_root)
        if not roots:
            roots = [config.adapters] if config.adapters is not None else []
            here = Path.cwd()
            if config.listen.is_loopback() and here != Path(here.anchor):
                roots.append(here)
        resolved = dict.fromkeys(os.path.realpath(root) for root in roots)
        return cls(tuple(resolved), prefixes(config.allow_source))

    def check(self, uri: str) -> None:
        """Check a path or URL, after following links, also those of the adapter's files. Raises AdapterSourceError; its
        text does not tell whether a path that is not allowed exists."""
        if is_remote(uri):
            self._check_url(canonical(uri))
            return
        where = local_path(uri)
        if not self._has(where):
            raise AdapterSourceError(
                f"adapter source {clip(uri)}: got a path that leads elsewhere, expected one below {self._shown()}; "
                "copy it there, or start the server with --adapter-root DIRECTORY"
            )
        for file in _files(where):
            if not self._has(file):
                raise AdapterSourceError(
                    f"adapter source {clip(uri)}: got {clip(file.name)}, a link that leads elsewhere, expected files "
                    f"below {self._shown()}; copy it there, or start the server with --adapter-root DIRECTORY"
                )

    def within(self, tenant: str) -> Allowed:
        """Return the sources of one tenant: in each directory and URL prefix, the part named like the tenant."""
        roots = tuple(os.path.join(root, tenant) for root in self.roots)  # noqa: PTH118  (they are texts)
        return Allowed(roots, tuple(f"{source.rstrip('/')}/{tenant}" for source in self.sources) or (NO_URL,))

    def _check_url(self, url: str) -> None:
        if self.sources and not is_listed(url, self.sources):
            raise AdapterSourceError(
                f"adapter source {clip(url)}: got a URL that is not allowed, expected one below "
                f"{', '.join(self.sources)}; start the server with --allow-source for others"
            )

    def _has(self, path: Path) -> bool:
        real = os.path.realpath(path)
        return any(os.path.commonpath((real, root)) == root for root in self.roots)

    def _shown(self) -> str:
        return " or ".join(self.roots) or "a directory that the server was started with (none was given)"


NOWHERE = Allowed()  # on this host


def _files(where: Path) -> list[Path]:
    try:
        with os.scandir(where) as entries:
            return [Path(one.path) for one in entries if is_watched(one.name)]
    except OSError:  # opening the file reports it
        return []
