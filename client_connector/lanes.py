"""The lanes of a client: of every shard one, with a link and the numbers of its steps; where there are replicas, one to
each of the shard's twins."""

from __future__ import annotations

import time
from collections.abc import Collection

import structlog
import torch

from client_connector.twins import TwinLinks
from lora_server.errors import LoraServerError, StepError, StepTimeoutError
from lora_server.placement import Layout
from lora_server.transport.base import Link

SUSPECT_SECONDS = 8.0  # longer than TCP takes to end the connections to a host that is gone: transport.address.watch
log = structlog.get_logger()


class Lane:
    """A link to one shard, with the sequence numbers of the steps on it. Used by one thread at a time.

    As a context manager: an error inside means that client and shard may no longer agree on seqs, so
    the lane is broken, and with it the session, unless the shard has a twin.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.shard = link.shard
        self.depth = link.region.layout.depth
        self.pushed = 0
        self.consumed = 0  # seq of the newest response that was consumed
        self.broken: LoraServerError | None = None
        self.is_silent = False  # a step went to a twin, since this lane had no answer; it may have one later

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.broken is None:
            self.broken = (
                error
                if isinstance(error, StepError)
                else StepError(f"an earlier step was interrupted by {error!r}; the next request joins anew")
            )

    def drain(self, deadline: float) -> None:
        """Consume what a failed exchange left behind."""
        if self.consumed < self.pushed:
            self.link.wait(self.pushed, deadline)
            self.consumed = self.pushed

    def look(self) -> None:
        """Find out whether the lane is broken, or has answered at last. Never waits."""
        if self.broken is not None:
            return
        try:
            if not self.is_silent:
                self.link.check()
                return
            self.drain(0.0)
            self.is_silent = False
        except StepTimeoutError:
            return
        except LoraServerError as error:
            self.broken = error

    @property
    def is_good(self) -> bool:
        """Whether steps may take this lane."""
        return self.broken is None and not self.is_silent


class ShardLanes:
    """The lane that the steps for each shard take. For the thread that starts them.

    It is the one to the replica that this client prefers. When that breaks, or had no answer for `failover` seconds,
    steps take a twin's lane, until the preferred one has answered or is connected again. The host of a silent shard is
    *suspect* until that shard answers, or for SUSPECT_SECONDS: its other shards are not waited for where a twin is on
    a host that is not.
    """

    def __init__(self, links: Collection[Link], layout: Layout, twins: TwinLinks | None = None) -> None:
        """`twins`: where there are replicas, what connects lost links again."""
        self._twins, self._width = twins, layout.width
        self.failover = twins.preference.failover if twins is not None else 0.0
        self._lanes: list[list[Lane]] = [[] for _ in range(layout.width)]  # by shard: the preferred one first
        self._suspects: dict[str, float] = {}  # host -> until when, time.monotonic()
        for link in links if twins is None else twins.take():
            self._add(link)
        self._chosen = [lanes[0] for lanes in self._lanes if lanes]
        self._is_unsettled = False  # a lane is lost or silent, or another one came
        self._devices = {link.device for link in links}

    def takes(self, device: torch.device) -> bool:
        """Return whether every shard takes activations from a device without a copy to the host."""
        return self._devices == {device}

    def _add(self, link: Link) -> None:
        lanes, first = (
            self._lanes[link.shard % self._width],
            self._twins.preference.replica if self._twins is not None else 0,
        )
        lanes.append(Lane(link))
        self._suspects.pop(link.host, None)
        lanes.sort(key=lambda lane: (lane.shard // self._width != first, lane.shard))

    def __getitem__(self, shard: int) -> Lane:
        return self._chosen[shard % self._width]

    @property
    def broken(self) -> LoraServerError | None:
        """The error by which a shard cannot be reached any more; None if each can."""
        for lane in self._chosen:
            if lane.broken is not None and all(one.broken is not None for one in self._lanes_of(lane)):
                return lane.broken
        return None

    def _lanes_of(self, lane: Lane) -> list[Lane]:
        return self._lanes[lane.shard % self._width]

    def look(self) -> None:
        """Find out which links are gone. `settle` gives back those that steps do not take, too."""
        for lanes in self._lanes:
            for lane in lanes:
                lane.look()
                self._is_unsettled |= lane.broken is not None

    def settle(self) -> None:
        """Choose the lane of each shard anew, if any has changed. Call it before an exchange."""
        if self._twins is None:
            return
        arrived = self._twins.take()
        for link in arrived:
            self._add(link)
        if not (arrived or self._is_unsettled or any(lane.broken is not None for lane in self._chosen)):
            return
        now = time.monotonic()
        self._suspects = {host: until for host, until in self._suspects.items() if until > now}
        for lane in [lane for lanes in self._lanes for lane in lanes if lane.is_silent]:
            lane.look()
            if lane.is_good:
                self._suspects.pop(lane.link.host, None)
        for shard, lanes in enumerate(self._lanes):
            for lane in [lane for lane in lanes if lane.broken is not None]:
                if len(lanes) > 1:
                    lanes.remove(lane)
                    self._twins.part(lane.link)
            self._chosen[shard] = min(lanes, key=lambda lane: (not lane.is_good, self.is_suspect(lane)))
        self._is_unsettled = bool(self._suspects) or any(not lane.is_good for lanes in self._lanes for lane in lanes)

    def is_suspect(self, lane: Lane) -> bool:
        """Return whether a shard of the lane's host is silent, this one or another."""
        return lane.link.host in self._suspects

    def is_given_up(self, lane: Lane) -> bool:
        """Return whether a lane is not worth waiting for: its host is suspect, and that of a good twin is not."""
        return self.is_suspect(lane) and any(not self.is_suspect(one) for one in self._spares(lane))

    def has_twin(self, lane: Lane) -> bool:
        """Return whether a shard has another lane that may answer, now or later."""
        return self._twins is not None and any(one.broken is None for one in self._lanes_of(lane) if one is not lane)

    def _spares(self, lane: Lane) -> list[Lane]:
        """Return a shard's other lanes that are good, found out just now; those to suspect hosts come last."""
        others = [one for one in self._lanes_of(lane) if one is not lane]
        for one in others:
            one.look()
        return sorted((one for one in others if one.is_good), key=self.is_suspect)

    def replace(self, lane: Lane, error: LoraServerError) -> Lane:
        """Choose a twin's lane instead of one that failed with `error`. Where there is none, raise that, or keep a lane
        that is silent: it may still answer."""
        spare = next(iter(self._spares(lane)), None)
        if spare is None:
            if not isinstance(error, StepTimeoutError):
                raise error
            lane.broken = None
            return lane
        if isinstance(error, StepTimeoutError):
            lane.broken, lane.is_silent = None, True
            if lane.link.host:
                self._suspects[lane.link.host] = time.monotonic() + SUSPECT_SECONDS
        self._chosen[lane.shard % self._width], self._is_unsettled = spare, True
        if not lane.is_good:
            log.warning("steps go to a shard's twin", shard=lane.shard, twin=spare.shard, why=str(error))
        return spare
