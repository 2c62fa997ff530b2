"""Retry requests to a source after transient errors, known by status, errno and name: no library is imported for it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, wait_random_exponential

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
