"""Names that nobody registered, and where their adapters would be: `--resolve s3://adapters/{tenant}/{name}`.

Whoever asks for such a name brings it in, as `adapters add` would, and asks again meanwhile. All who ask for one name
wait for one addition; a name that leads nowhere is not looked for again for a while.
"""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lora_server.control.adapters.registry import check_name
from lora_server.errors import AdapterError, ConfigError, LoraServerError, ServerBusyError, UnknownAdapterError
from lora_server.sources.fetch import FETCH_SECONDS
from lora_server.timings import Timings

DEFAULT_TENANT = "default"
AT_ONCE, COMING, REFUSED = 4, 64, 1024  # that are brought, that wait for it too, that are remembered
FIELDS = ("tenant", "name")


def check_template(template: str) -> str:
    """Raises ConfigError for what is none."""
    try:
        fields = [field for _, field, how, _ in string.Formatter().parse(template) if field is not None or how]
    except ValueError:
        fields = [""]
    if "://" not in template or "name" not in fields or not set(fields) <= set(FIELDS):
        raise ConfigError(
            f"--resolve: got {template!r}, expected a URL with {{name}}, and {{tenant}} where tenants have places of "
            "their own, such as s3://adapters/{tenant}/{name}"
        )
    return template


class Resolver:
    """Thread-safe. `add(name, uri, seconds)` registers an adapter, and raises why it cannot."""

    def __init__(
        self,
        template: str,
        add: Callable[[str, str, float], object],
        clock: Callable[[], float] = time.monotonic,
        again_seconds: float = Timings.resolve_again,
    ) -> None:
        """Raises ConfigError for a template that is none."""
        self._template, self._add, self._clock = check_template(template), add, clock
        self._again_seconds = again_seconds
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="resolve")
        self._lock = threading.Lock()
        self._coming: set[str] = set()
        self._refused: dict[str, tuple[float, str]] = {}  # until when, and why; the oldest first

    def uri(self, name: str) -> str:
        """Where it would be. A name without a slash is the default tenant's."""
        tenant, slash, rest = name.partition("/")
        return self._template.format(tenant=tenant if slash else DEFAULT_TENANT, name=rest if slash else name)

    def ask(self, name: str) -> None:
        """Bring it. Raises ServerBusyError while it comes, UnknownAdapterError where it does not."""
        try:
            check_name(name)
        except AdapterError as error:
            raise UnknownAdapterError(str(error)) from error
        with self._lock:
            until, why = self._refused.get(name, (0.0, ""))
            if self._clock() < until:
                raise UnknownAdapterError(why)
            if name not in self._coming and len(self._coming) < COMING:
                self._coming.add(name)
                self._threads.submit(self._bring, name)
        raise ServerBusyError(f"adapter {name!r}: is being brought from {self.uri(name)}; ask again")

    def _bring(self, name: str) -> None:
        why = ""
        try:
            self._add(name, self.uri(name), FETCH_SECONDS)
        except AdapterError as error:
            why = f"adapter {name!r}: not registered here, and not to be had from {self.uri(name)}: {error}"
        except LoraServerError:  # the server's own state: who asks again tries again
            pass
        finally:
            with self._lock:
                self._coming.discard(name)
                self._refused.pop(name, None)
                if why:
                    self._refused[name] = self._clock() + self._again_seconds, why
                while len(self._refused) > REFUSED:
                    del self._refused[next(iter(self._refused))]

    def close(self) -> None:
        """What was not begun is not."""
        self._threads.shutdown(wait=False, cancel_futures=True)
