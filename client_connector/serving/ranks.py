"""The tensor-parallel ranks of an engine: rank 0 decides for all of them, and all pool the failures that each saw.

All ranks must make the same calls in the same order. Objects travel by the engine's own group for CPUs, which ends each
wait after a time of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import distributed

from client_connector.serving.plan import RETRY, Failure

T = TypeVar("T")


class RankGroup:
    """The ranks that compute one model together."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """`group` None: an engine with a single rank."""
        self._group = None if group is None or group.size() == 1 else group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._group is None or self._group.rank() == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """Return, on every rank, what `make` returns on rank 0; the others do not call it."""
        if self._group is None:
            return make()
        made = [make() if self.is_first else None]
        distributed.broadcast_object_list(made, group=self._group, group_src=0)
        return made[0]  # type: ignore[return-value]

    def gather(self, own: T) -> list[T]:
        """Return what every rank has, in the order of the ranks."""
        if self._group is None:
            return [own]
        all_ranks: list[T] = [own] * self._group.size()
        distributed.all_gather_object(all_ranks, own, group=self._group)
        return all_ranks

    def agree(self, failures: dict[str, Failure]) -> dict[str, Failure]:
        """Return, by request, the failures of all ranks: they sum deltas, so one that lacks its own voids the result.

        If several ranks failed the same request, the first failure that is not RETRY counts.
        """
        if self._group is None:
            return failures
        count = torch.tensor([len(failures)])
        distributed.all_reduce(count, group=self._group)
        if not count.item():
            return {}
        agreed: dict[str, Failure] = {}
        for own in self.gather(failures):
            for request, failure in own.items():
                if request not in agreed or agreed[request].code == RETRY:
                    agreed[request] = failure
        return agreed
