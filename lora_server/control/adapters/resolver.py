"""Adds adapters on their first request, from a URL template: `--resolve s3://adapters/{tenant}/{name}`.

A request for an unregistered name starts what `adapters add` does, and is told to retry until it is done. Requests for
one name share one addition. A name without files, or over its tenant's limits, is not tried again for a while.
"""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lora_server.control.adapters.records import check_name
from lora_server.errors import (
    AdapterError,
    ConfigError,
    LimitError,
    LoraServerError,
    ServerBusyError,
    UnknownAdapterError,
    rebuild,
)
from lora_server.sources.fetch import FETCH_SECONDS
from lora_server.sources.urls import ACCEPTED, EXTRAS
from lora_server.timings import Timings

DEFAULT_TENANT = "default"
AT_ONCE, COMING, REFUSED = 4, 64, 1024  # additions that run at once, that run or wait, failures remembered
FIELDS = ("tenant", "name")
Add = Callable[[str, str, float], object]  # name, uri, seconds: registers an adapter, and raises why it cannot


def check_template(template: str) -> str:
    """Return the template if it is valid; raises ConfigError otherwise."""
    try:
        fields = [field for _, field, how, _ in string.Formatter().parse(template) if field is not None or how]
    except ValueError:
        fields = [""]
    scheme = template.partition("://")[0].lower()
    if scheme not in ("file", *EXTRAS) or "name" not in fields or not set(fields) <= set(FIELDS):
        raise ConfigError(
            f"--resolve: got {template!r}, expected a URL with {{name}}, and {{tenant}} where tenants have places of "
            f"their own, such as s3://adapters/{{tenant}}/{{name}}; taken are {ACCEPTED}"
        )
    return template


class Resolver:
    """Adds unregistered adapters from the template's URLs, on threads of its own. Thread-safe."""

    def __init__(
        self,
        template: str,
        clock: Callable[[], float] = time.monotonic,
        again_seconds: float = Timings.resolve_again,
    ) -> None:
        """Raises ConfigError for an invalid template."""
        self._template, self._clock = check_template(template), clock
        self._again_seconds = again_seconds
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="resolve")
        self._lock = threading.Lock()
        self._coming: set[str] = set()
        self._refused: dict[str, tuple[float, str, str]] = {}  # until when, the error's code and text; the oldest first

    def uri(self, name: str) -> str:
        """Return the URL of the adapter of this name. A name without a slash belongs to the default tenant."""
        tenant, slash, rest = name.partition("/")
        return self._template.format(tenant=tenant if slash else DEFAULT_TENANT, name=rest if slash else name)

    def ask(self, name: str, add: Add) -> None:
        """Start adding an adapter in the background, unless that runs already.

        Raises ServerBusyError while it runs; UnknownAdapterError or LimitError for a while after it failed.
        """
        try:
            check_name(name)
        except AdapterError as error:
            raise UnknownAdapterError(str(error)) from error
        with self._lock:
            until, code, why = self._refused.get(name, (0.0, "", ""))
            if self._clock() < until:
                raise rebuild(code, why)
            if name not in self._coming and len(self._coming) < COMING:
                self._coming.add(name)
                self._threads.submit(self._bring, name, add)
        raise ServerBusyError(f"adapter {name!r}: is being added from {self.uri(name)}; try again")

    def _bring(self, name: str, add: Add) -> None:
        code = why = ""
        try:
            add(name, self.uri(name), FETCH_SECONDS)
        except AdapterError as error:
            code = UnknownAdapterError.code
            why = f"adapter {name!r}: not registered here, and cannot be added from {self.uri(name)}: {error}"
        except LimitError as error:
            code, why = error.code, str(error)
        except LoraServerError:  # the server's own state: the next request tries again
            pass
        finally:
            with self._lock:
                self._coming.discard(name)
                self._refused.pop(name, None)
                if why:
                    self._refused[name] = self._clock() + self._again_seconds, code, why
                while len(self._refused) > REFUSED:
                    del self._refused[next(iter(self._refused))]

    def close(self) -> None:
        """Cancel additions that have not begun. Does not wait for those that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
