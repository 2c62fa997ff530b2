"""The shards of a node: a set of processes for each placement that its controller names, two during a resize."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import structlog

from lora_server.config import ProcessConfig
from lora_server.daemon import processes
from lora_server.daemon.processes import Child
from lora_server.errors import LoraServerError

OnFatal = Callable[[LoraServerError], None]
StartShard = Callable[[str, ProcessConfig, OnFatal], Child]  # the first is its name
log = structlog.get_logger()


class NodeShards:
    """The shards of this node, by the generation of their placement. Thread-safe.

    Where two placements run, the failure of a shard of the later one ends nothing yet: the controller may go on with
    the earlier one. It is fatal if the later one remains.
    """

    def __init__(self, process: ProcessConfig, start: StartShard, on_fatal: OnFatal) -> None:
        """`process`: the node's own settings, but for the layout."""
        self._process, self._start, self._on_fatal = process, start, on_fatal
        self._layouts: dict[int, str] = {}
        self._running: dict[int, list[Child]] = {}
        self.failed: dict[int, LoraServerError] = {}  # why shards cannot be started
        self.on_failed: Callable[[int, LoraServerError], object] = lambda generation, reason: None
        self._closed = False
        self._lock = threading.Lock()

    def run(self, layouts: Mapping[int, str]) -> None:
        """Run the shards of these layouts, by generation, and stop all others."""
        with self._lock:
            if self._closed:
                return
            for generation, layout in list(self._layouts.items()):
                if layouts.get(generation) != layout:
                    processes.stop(self._running.pop(generation), self._process.timings.stop)
                    self._layouts.pop(generation)
                    self.failed.pop(generation, None)
            if (reason := self.failed.get(min(layouts))) is not None:
                self._on_fatal(reason)
            for generation in sorted(layouts.keys() - self._layouts.keys()):
                self._layouts[generation], self._running[generation] = layouts[generation], []
                self._start_all(
                    self._process.model_copy(update={"layout": layouts[generation], "generation": generation})
                )

    def _start_all(self, process: ProcessConfig) -> None:
        layout, generation = process.replicated, process.generation
        if not process.local_shards:
            log.warning("this node has no shards; a resize to a larger layout gives it some", layout=process.layout)
        for shard in process.local_shards:
            name = f"shard {shard} (stage {layout.stage(shard)}, ep_rank {layout.ep_rank(shard)})"
            if generation > 1:
                name = f"{name} of generation {generation}"

            def fail(reason: LoraServerError) -> None:
                self.failed[generation] = reason
                if generation == min(self._running, default=generation):
                    self._on_fatal(reason)
                else:
                    log.error("a shard of the new layout cannot be started", generation=generation, reason=str(reason))
                    self.on_failed(generation, reason)

            self._running[generation].append(self._start(name, process.model_copy(update={"shard": shard}), fail))

    @property
    def layout(self) -> str:
        """The layout of the newest placement; empty before the controller has named one."""
        return max(list(self._layouts.items()), default=(0, ""))[1]

    def restarts(self) -> dict[int, int]:
        """Return how often each shard was restarted."""
        return {child.config.shard: child.restarts for child in self.children}

    @property
    def children(self) -> list[Child]:
        """The processes."""
        return [child for children in list(self._running.values()) for child in children]

    def close(self) -> list[Child]:
        """Start no more; return the processes, which the caller stops."""
        with self._lock:
            self._closed = True
            return self.children
