"""The files of one adapter behind a URL, in whatever fsspec opens. It, and what it needs, is imported here alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_server.adapters import CONFIG, INDEX, WEIGHTS, Limits, check_values, no_weights, weight_map
from lora_server.errors import AdapterSourceError

EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "hf": "hf", "gs": "gs", "gcs": "gs"}
SILENCE_SECONDS = 30.0  # of an HTTP server; other libraries have limits of their own
_ABSENT = (404, 410)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")


def is_remote(source: str) -> bool:
    """Whether it is a URL, of anything but a file of this host."""
    match = _URL.fullmatch(source)
    return match is not None and match[1].lower() != "file"


def canonical(url: str) -> str:
    """One text for one place; raises AdapterSourceError for a URL that cannot be one of an adapter's directory."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    secret = "@" in host and scheme.lower() != "hf"  # would be shown to everybody
    if secret or any(mark in rest for mark in ("::", "?", "#")):
        raise AdapterSourceError(
            f"adapter source {scheme}://...: got a URL with a query, a fragment, a password or a chain, expected that "
            "of a directory; give credentials to the server's processes, in their environment or their home"
        )
    return f"{scheme.lower()}://{rest.rstrip('/')}"


class RemoteAdapter:
    """Its methods raise what the library of its file system raises, and AdapterError."""

    def __init__(self, url: str, limits: Limits) -> None:
        """Raises AdapterSourceError for a scheme that is unknown, or whose package is missing."""
        self.url, self._limits = url, limits
        self._files, path = _open(url)
        self._path = path.rstrip("/")

    def sizes(self, check: Callable[[], None]) -> dict[str, int]:
        """Of each file that the adapter has there, in bytes; `check` is called between requests, and may raise."""
        self._files.invalidate_cache()
        sizes = {name: self._size(name) for name in (CONFIG, WEIGHTS)}
        if sizes[WEIGHTS] is None:
            sizes[INDEX] = self._size(INDEX)
        found = {name: size for name, size in sizes.items() if size is not None}
        if CONFIG not in found:
            raise AdapterSourceError(
                f"adapter source {self.url}: got no {CONFIG} there, expected the directory of an adapter saved by "
                "PEFT; check the address, and what the server's credentials may read"
            )
        if INDEX in found:
            self._check_small(INDEX, found[INDEX], self._limits.index_bytes)
            content = self._files.cat_file(self._at(INDEX))
            check_values(INDEX, content, self._limits.index_bytes)
            for name in set(weight_map(content).values()):
                check()
                if (size := self._size(name)) is not None:
                    found[name] = size
        elif WEIGHTS not in found:
            raise no_weights([name for name in ("adapter_model.bin",) if self._size(name) is not None])
        self._check_small(CONFIG, found[CONFIG], self._limits.config_bytes)
        return found

    def get(self, name: str, target: Path, size: int, check: Callable[[], None]) -> None:
        """Copy one file; `check` is called between pieces, and may raise."""
        from fsspec.callbacks import Callback

        def look(_: int, value: int, **__: Any) -> None:
            if value > size:
                raise ConnectionError(f"{name}: got more than the {size} bytes that it has")
            check()

        self._files.get_file(self._at(name), str(target), callback=Callback(size, hooks={"look": look}))
        got = target.stat().st_size
        if got != size:
            raise ConnectionError(f"{name}: got {got} of {size} bytes")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _size(self, name: str) -> int | None:
        """None where there is no such file."""
        try:
            size = self._files.info(self._at(name)).get("size")
        except FileNotFoundError as error:
            cause = error.__cause__  # fsspec says of any answer over HTTP that there is no such file
            if getattr(cause, "status", 404) in _ABSENT or cause is None:
                return None
            raise cause from None
        if size is None:
            raise AdapterSourceError(f"adapter source {self.url}: does not say how large {name} is; use another server")
        return int(size)

    def _check_small(self, name: str, size: int, most: int) -> None:
        if size > most:
            raise AdapterSourceError(
                f"adapter source {self.url}: {name}: got {size} bytes, expected at most {most} for this base model"
            )


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url, skip_instance_cache=True, **_options(scheme))
    except ImportError as error:
        package = f"lora-server[{EXTRAS[scheme]}]" if scheme in EXTRAS else "what fsspec needs for it"
        raise AdapterSourceError(f"adapter source {url}: {error}; install {package} on every node") from error
    except ValueError as error:
        raise AdapterSourceError(
            f"adapter source {url}: got scheme {scheme!r}, expected a path, file://, or what fsspec opens, such as "
            f"s3://, gs://, hf:// or https:// ({error})"
        ) from error
    return files, str(path)


def _options(scheme: str) -> dict[str, Any]:
    if EXTRAS.get(scheme) != "http":
        return {}
    import aiohttp

    silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
    return {"client_kwargs": {"timeout": silence}}
