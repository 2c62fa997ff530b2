"""Autoscaling: GPUs that a server's load asks for, look by look, as metrics, and the resizes that follow from them.

A server grows at once. It shrinks to the most that was asked for in the last `calm_s` seconds, so that a load that goes
and comes again moves nothing twice; the GPUs that it has at the first look count as asked for. GPUs are those of all
replicas, of which the server has as many as the plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from lora_server.placement import Layout
from provisioning.inputs import InputError
from provisioning.plan.candidates import Candidate, candidates
from provisioning.watch.advice import at_load, now
from provisioning.watch.measured import Measured

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """GPUs that a server may have; the load is taken `headroom` times as high as it was measured."""

    least: int
    most: int
    calm_s: float = 600.0
    headroom: float = 1.1

    def within(self, gpus: int) -> int:
        """Return the nearest number of GPUs that the server may have."""
        return min(max(gpus, self.least), self.most)

    def of(self, replicas: int) -> Bounds:
        """Return these bounds, narrowed to multiples of `replicas`. Raises InputError where there is none within."""
        least, most = math.ceil(self.least / replicas) * replicas, self.most // replicas * replicas
        if least > most:
            raise InputError(
                f"--min-gpus, --max-gpus: got {self.least} and {self.most}, expected a multiple of {replicas} from one "
                f"to the other: with the plan's --replicas {replicas} each shard is there as often"
            )
        return replace(self, least=least, most=most)


class RecentMost:
    """The largest of the values of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, int]] = deque()  # falling: a larger one hides those before it

    def add(self, at: float, value: int) -> int:
        """Add a value, and return the largest of the last ones."""
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((at, value))
        while self._values[0][0] <= at - self._seconds:
            self._values.popleft()
        return self._values[0][1]


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at a server: the GPUs that it has, that its load needs, needed at most in a day, and is to have."""

    serving: int
    needed: int
    peak: int
    wanted: int
    immediate: float  # share of the requests that were admitted at once; NaN without any

    @property
    def margin(self) -> float:
        """The part of the GPUs needed that the server has beyond them; below 0 where it lacks some."""
        return self.serving / self.needed - 1


class Autoscaler:
    """Turns measurements into looks, and looks into layouts. `resize` brings the server to a layout, and returns why it
    could not, or ''. Not thread-safe."""

    def __init__(self, plan: Candidate, bounds: Bounds, resize: Callable[[Layout], str] | None = None) -> None:
        """Without `resize` it only looks. Raises InputError for bounds that the plan's replicas do not fit."""
        self._plan, self._resize, self._replicas = plan, resize, plan.scenario.replicas
        self._bounds = bounds.of(self._replicas)
        self._recent, self._day = RecentMost(bounds.calm_s), RecentMost(DAY_S)
        self._looked = False
        self._quiet_until = -math.inf  # after a resize that failed
        self.resizes = {"done": 0, "failed": 0}
        self.failure = ""  # of the last resize

    def look(self, at: float, measured: Measured) -> Look:
        """Take what was measured until `at` (seconds since 1970), and resize the server if it is to have other GPUs."""
        serving = Layout.parse(measured.server.layout, self._replicas)
        look = self._look(at, measured, serving)
        if self._resize is not None and look.wanted != serving.num_shards and at >= self._quiet_until:
            layout = self._layout(measured, look.wanted)
            if layout is not None and layout != serving:
                self._act(at, layout)
        return look

    def _look(self, at: float, measured: Measured, serving: Layout) -> Look:
        needed = self.needed(measured)
        if not self._looked:  # what was asked for before is not known
            self._recent.add(at, serving.num_shards)
            self._looked = True
        return Look(
            serving=serving.num_shards,
            needed=needed,
            peak=self._day.add(at, needed),
            wanted=self._bounds.within(self._recent.add(at, needed)),
            immediate=measured.immediate,
        )

    def needed(self, measured: Measured) -> int:
        """Return the GPUs that a load needs: the most that there may be, where those are too few."""
        if not measured.requests:
            return self._bounds.least
        fuller = replace(measured, seconds=measured.seconds / self._bounds.headroom)  # as many requests in less time
        gpus = now(fuller, self._plan, seeds=0).gpus
        return self._bounds.most if gpus is None else gpus * self._replicas

    def _layout(self, measured: Measured, gpus: int) -> Layout | None:
        """Return the best layout of so many GPUs, or of the next number that has any."""
        scenario = at_load(self._plan.scenario, measured) if measured.requests else self._plan.scenario
        for more in range(gpus // self._replicas, self._bounds.most // self._replicas + 1):
            if found := candidates(scenario, more):
                return replace(found[0].layout, replicas=self._replicas)
        return None

    def _act(self, at: float, layout: Layout) -> None:
        assert self._resize is not None
        self.failure = self._resize(layout)
        self.resizes["failed" if self.failure else "done"] += 1
        if self.failure:
            self._quiet_until = at + self._bounds.calm_s
