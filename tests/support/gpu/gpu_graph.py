"""A CUDA graph on the GPU that is this CPU: what is launched and computed once is played again, with the arguments that
it had and into the memory that it had, on queues of its own: it outlives the links."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from client_connector.serving.launched import LaunchedPass
from tests.support.gpu.emulated_gpu import EmulatedQueue


class _Computed(TorchDispatchMode):
    """torch's own operators, in a captured stream."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        self._steps.append(lambda: _again(operator, args, kwargs, result))
        return result


def _again(operator: Any, args: Any, kwargs: Any, before: Any) -> None:
    for old, new in zip(tree_leaves(before), tree_leaves(operator(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class Graph:
    def __init__(self, forward: LaunchedPass) -> None:
        self._forward = forward
        self._steps: list[Callable[[], None]] = []
        self.launches: list[tuple[int, str, tuple[int, ...]]] = []  # shard, kernel, arguments
        self._own = [EmulatedQueue(queue._nvshmem) for queue in self._queues()]

    def _queues(self) -> list[Any]:
        return [captured.link.queue for captured in self._forward.sites.links.captured]

    @contextlib.contextmanager
    def capture(self, with_adapters: bool = True) -> Iterator[None]:
        """Capture launches in the graph, in a rehearsal without adapter rows."""
        launch, lead = EmulatedQueue.launch, EmulatedQueue.lead_engine

        def launched(queue: EmulatedQueue, kernel: str, *values: int) -> None:
            shard = self._queues().index(queue)
            self.launches.append((shard, kernel, values))
            self._steps.append(lambda: self._own[shard].launch(kernel, *values))
            launch(queue, kernel, *values)

        def led(queue: EmulatedQueue) -> None:
            shard = self._queues().index(queue)
            self._steps.append(lambda: self._own[shard].lead_engine())
            lead(queue)

        EmulatedQueue.launch, EmulatedQueue.lead_engine = launched, led
        try:
            with self._forward.rehearse(with_adapters), _Computed(self._steps):
                yield
        finally:
            EmulatedQueue.launch, EmulatedQueue.lead_engine = launch, lead

    def replay(self) -> None:
        for step in self._steps:
            step()
