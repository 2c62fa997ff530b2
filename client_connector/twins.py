"""Links to shards that have twins: a session can do with one of each, and connects the others again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from lora_server.errors import LeaseError, LoraServerError, ShardUnavailableError
from lora_server.logs import Repeats
from lora_server.placement import Placement
from lora_server.transport.base import Link
from lora_server.wire import lora_server_pb2 as pb

Open = Callable[[pb.Endpoint, float], Link]  # by a deadline, time.monotonic()
log = structlog.get_logger()


class Preference(NamedTuple):
    """The replica that a client's steps prefer, and the seconds without an answer after which one goes to a twin."""

    replica: int
    failover: float


class TwinLinks:
    """The links of a session to replicated shards; lost ones are connected again. Thread-safe.

    The thread of the steps takes links, and gives back those that broke; that of the heartbeats connects them again.
    """

    def __init__(self, links: list[Link], open_link: Open, placement: Placement, preference: Preference) -> None:
        """`links`: the session's own, which it closes."""
        self._links, self._open, self._layout = links, open_link, placement.layout
        self.generation, self.preference = placement.generation, preference
        self._arrived: list[Link] = []
        self._is_closed = False
        self._complain = Repeats(log.warning)
        self._lock = threading.Lock()

    def join(self, endpoints: Iterable[pb.Endpoint], deadline: float) -> None:
        """Connect to the shards. Raises the error of a shard of which no twin can be connected."""
        errors = self._connect(endpoints, deadline)
        unserved = self._layout.unserved(self.lacking())
        for shard, error in errors.items():
            if shard % self._layout.width in unserved:
                raise error

    def mend(self, endpoints: Iterable[pb.Endpoint], deadline: float) -> None:
        """Connect to shards that are up again; those that cannot be reached stay lacking."""
        for shard in {endpoint.shard for endpoint in endpoints} - self._connect(endpoints, deadline).keys():
            log.info("a shard's twin is connected again", shard=shard)

    def _connect(self, endpoints: Iterable[pb.Endpoint], deadline: float) -> dict[int, LoraServerError]:
        """Connect; return why some shards could not be."""
        errors = dict[int, LoraServerError]()
        for endpoint in endpoints:
            try:
                link = self._open(endpoint, deadline)
            except (LeaseError, ShardUnavailableError) as error:
                errors[endpoint.shard] = error
                self._complain(endpoint.shard, "a shard cannot be connected", shard=endpoint.shard, why=str(error))
                continue
            if not self._add(link):
                link.close()
        return errors

    def _add(self, link: Link) -> bool:
        """Keep a link for the steps' thread; return False where the session was left."""
        with self._lock:
            if not self._is_closed:
                self._links.append(link)
                self._arrived.append(link)
            return not self._is_closed

    def lacking(self) -> list[int]:
        """Return the shards that the session has no link to."""
        with self._lock:
            here = {link.shard for link in self._links}
        return [shard for shard in range(self._layout.num_shards) if shard not in here]

    def take(self) -> list[Link]:
        """Return the links that were connected since the last call."""
        if not self._arrived:
            return []
        with self._lock:
            arrived, self._arrived = self._arrived, []
        return arrived

    def part(self, link: Link) -> None:
        """Close a link that broke."""
        with self._lock:
            self._links.remove(link)
        link.close()

    def close(self) -> None:
        """Connect no more; the session closes the links."""
        with self._lock:
            self._is_closed = True
