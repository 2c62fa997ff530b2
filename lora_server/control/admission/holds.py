"""Which client holds which adapter, and how often. Not thread-safe: `adapters` calls it under its lock.

After a restart of the controller nobody knows, until each client has said it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


class Holds:
    """By handle. While the holds of a client are unknown, everything counts as held.

    `changed(handle, more)` hears of every hold that begins, or ends.
    """

    def __init__(self, changed: Callable[[int, int], object] = lambda handle, more: None) -> None:
        self._changed = changed
        self._holders: dict[int, Counter[int]] = {}  # handle -> client -> times acquired
        self._unknown: set[int] = set()

    def acquire(self, client: int, handles: Iterable[int]) -> set[int]:
        """Once more each; which it did not hold before."""
        more = set()
        for handle in handles:
            holders = self._holders.setdefault(handle, Counter())
            if client not in holders:
                more.add(handle)
            holders[client] += 1
            self._changed(handle, 1)
        return more

    def release(self, client: int, handles: Iterable[int]) -> set[int]:
        """Once less each, what is not held is ignored; which it does not hold any more."""
        fewer = set()
        for handle in handles:
            holders = self._holders.get(handle)
            if holders is not None and holders[client] > 0:
                holders[client] -= 1
                self._changed(handle, -1)
                self._trim(handle)
                if not self.has(client, handle):
                    fewer.add(handle)
        return fewer

    def forget_client(self, client: int) -> None:
        """The client is gone."""
        self._unknown.discard(client)
        for handle, holders in list(self._holders.items()):
            if times := holders.pop(client, 0):
                self._changed(handle, -times)
            self._trim(handle)

    def expect(self, client: int) -> None:
        """A client that joined an earlier controller: it has to say what it holds."""
        self._unknown.add(client)

    def is_unknown(self, client: int) -> bool:
        """Whether it still has to say so."""
        return client in self._unknown

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """What a client says that it holds; what it acquired meanwhile is among it."""
        self._unknown.discard(client)
        for handle, times in Counter(handles).items():
            holders = self._holders.setdefault(handle, Counter())
            if times > holders[client]:
                self._changed(handle, times - holders[client])
            holders[client] = max(holders[client], times)

    def handles(self) -> set[int]:
        """All that somebody holds, as far as is known."""
        return set(self._holders)

    def anybody_unknown(self) -> bool:
        """Whether a client still has to say what it holds."""
        return bool(self._unknown)

    def count(self, handle: int) -> int:
        """Clients that hold it, as far as is known."""
        return len(self._holders.get(handle, ()))

    def times(self, handle: int) -> int:
        """How often it was acquired and not released, as far as is known."""
        return sum(self._holders.get(handle, {}).values())

    def has(self, client: int, handle: int) -> bool:
        """Whether a client holds it."""
        return client in self._holders.get(handle, ())

    def by_client(self) -> dict[int, set[int]]:
        """All that is known."""
        found: dict[int, set[int]] = {}
        for handle, holders in self._holders.items():
            for client in holders:
                found.setdefault(client, set()).add(handle)
        return found

    def of(self, client: int) -> list[int]:
        """What a client holds, as far as is known."""
        return [handle for handle, holders in self._holders.items() if client in holders]

    def is_held(self, handle: int) -> bool:
        """Whether somebody does, or may."""
        return bool(self._unknown) or handle in self._holders

    def _trim(self, handle: int) -> None:
        held = +self._holders[handle]
        if held:
            self._holders[handle] = held
        else:
            del self._holders[handle]
