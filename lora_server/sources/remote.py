"""Files of one adapter behind a URL that fsspec opens. Only this module imports fsspec."""

from __future__ import annotations

import asyncio
import errno
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tenacity import Retrying, retry_if_exception, wait_random_exponential

from lora_server.adapters import CONFIG, INDEX, WEIGHTS, AdapterLimits, check_values, no_weights, weight_map
from lora_server.errors import AdapterSourceError
from lora_server.sources.redirects import RedirectPolicy
from lora_server.sources.urls import EXTRAS, canonical

CHECK_SECONDS = 0.1  # between two checks whether a request was cancelled
_ABSENT = (404, 410)


class RemoteAdapter:
    """Raises AdapterError, and the errors of the file system's library. Its context hides what a redirect led to."""

    def __init__(self, url: str, limits: AdapterLimits, listed: Sequence[str] = ()) -> None:
        """`listed`: see RedirectPolicy. Raises AdapterSourceError for a scheme that is not accepted, or that needs a
        package that is not installed."""
        self.url, self._limits, self._redirects = url, limits, RedirectPolicy(listed)
        self._files, path = _open(canonical(url), self._redirects)
        self._path = path.rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._redirects.followed and isinstance(error, Exception) and not isinstance(error, AdapterSourceError):
            status = getattr(error, "status", "none")
            raise AdapterSourceError(
                f"adapter source {self.url}: it redirects to what is no adapter of this base model, or cannot be read "
                f"({type(error).__name__}, status {status}); name the address that it leads to, to be told more"
            ) from error

    def sizes(self, check: Callable[[], None]) -> dict[str, int]:
        """Return the size of each file of the adapter; `check` is called between requests, and may raise."""
        self._files.invalidate_cache()
        sizes = {name: self._size(name, check) for name in (CONFIG, WEIGHTS)}
        if sizes[WEIGHTS] is None:
            sizes[INDEX] = self._size(INDEX, check)
        found = {name: size for name, size in sizes.items() if size is not None}
        if CONFIG not in found:
            raise AdapterSourceError(
                f"adapter source {self.url}: got no {CONFIG} there, expected the directory of an adapter saved by "
                "PEFT; check the address, and what the server's credentials may read"
            )
        if INDEX in found:
            self._check_small(INDEX, found[INDEX], self._limits.index_bytes)
            with tempfile.TemporaryDirectory() as place:
                self.get(INDEX, index := Path(place) / INDEX, found[INDEX], check)
                content = index.read_bytes()
            check_values(INDEX, content, self._limits.index_bytes)
            for name in set(weight_map(content).values()):
                if (size := self._size(name, check)) is not None:
                    found[name] = size
        elif WEIGHTS not in found:
            raise no_weights([name for name in ("adapter_model.bin",) if self._size(name, check) is not None])
        self._check_small(CONFIG, found[CONFIG], self._limits.config_bytes)
        return found

    def get(self, name: str, target: Path, size: int, check: Callable[[], None]) -> None:
        """Copy one file; `check` is called between pieces, and may raise."""
        from fsspec.callbacks import Callback

        def look(_: int, value: int, **__: Any) -> None:
            if value > size:
                raise ConnectionError(f"{name}: got more than the {size} bytes that it has")
            check()

        self._call("get_file", check, self._at(name), str(target), callback=Callback(size, hooks={"look": look}))
        got = target.stat().st_size
        if got != size:
            raise ConnectionError(f"{name}: got {got} of {size} bytes")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _call(self, method: str, check: Callable[[], None], *args: Any, **options: Any) -> Any:
        """Call a method of the file system. Asynchronous ones (http, s3, gs) end when `check` raises."""
        check()
        if not self._files.async_impl:
            return getattr(self._files, method)(*args, **options)
        work = getattr(self._files, f"_{method}")(*args, **options)
        future = asyncio.run_coroutine_threadsafe(work, self._files.loop)
        try:
            while not wait([future], CHECK_SECONDS).done:
                check()
            return future.result()
        except Exception:
            if self._redirects.refused is not None:
                raise self._redirects.refused from None
            raise
        finally:
            future.cancel()

    def _size(self, name: str, check: Callable[[], None]) -> int | None:
        """Return the size of a file; None where there is no such file."""
        try:
            size = self._call("info", check, self._at(name)).get("size")
        except FileNotFoundError as error:
            cause = error.__cause__  # fsspec turns any failure over HTTP into this error
            if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) in _ABSENT:
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


def _open(url: str, redirects: RedirectPolicy) -> tuple[Any, str]:
    extra = EXTRAS[url.partition("://")[0]]
    options = {"get_client": redirects.session} if extra == "http" else {}
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        raise AdapterSourceError(
            f"adapter source {url}: {error}; pip install '.[{extra}]' in a checkout of lora-server on every node"
        ) from error
    return files, str(path)


ATTEMPTS = 5
MIN_PAUSE, MAX_PAUSE = 0.1, 5.0  # seconds
_STATUSES = (408, 425, 429)  # and 500 and above
_NUMBERS = (errno.EIO, errno.EAGAIN, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EBUSY)
# of Python; of aiohttp; of botocore, httpx and urllib3
_NAMES = {
    *("ConnectionError", "TimeoutError"),
    *("ClientConnectionError", "ClientPayloadError"),
    *("HTTPClientError", "TransportError", "ProtocolError"),
}
_T = TypeVar("_T")


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status in _STATUSES or status >= 500
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    return any(kind.__name__ in _NAMES for kind in type(error).__mro__)


def patiently(request: Callable[[], _T], deadline: float) -> _T:
    """Return the result of a request; retries transient errors up to ATTEMPTS times, until `deadline`
    (time.monotonic())."""
    retrying = Retrying(
        retry=retry_if_exception(may_pass),
        stop=lambda state: state.attempt_number >= ATTEMPTS or time.monotonic() > deadline,
        wait=wait_random_exponential(MIN_PAUSE, max=MAX_PAUSE),
        reraise=True,
    )
    return retrying(request)
