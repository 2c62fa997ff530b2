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


def why_fixed(config: ProcessConfig) -> str:
    """Return why a server with these settings cannot be resized; empty if it can."""
    settings = {
        f"--nodes {config.nodes}": config.nodes > 1,
        f"--replicas {config.replicas}": config.replicas > 1,
        f"--gpu-transport {config.gpu_transport}": config.gpu_transport != "cuda_ipc",
        f"--data-port-base {config.data_port_base}": config.data_port_base is not None,
        "a standby": config.has_standby,
    }
    given = next((setting for setting, is_given in settings.items() if is_given), "")
    return f"a server with {given} cannot be resized while it serves: start it with that --layout" if given else ""


class NodeShards:
    """The shards of this node, by the generation of their placement. Thread-safe.

    Where two placements run, the failure of a shard of the later one ends nothing yet: the controller may go on with
    the earlier one. It is fatal if the later one remains.
    """

    def __init__(self, process: ProcessConfig, start: StartShard, on_fatal: OnFatal) -> None:
        """`process`: the node's own settings, but for the layout."""
        self._process, self._start, self._on_fatal = process, start, on_fatal
        self._running: dict[int, list[Child]] = {}
        self._failed: dict[int, LoraServerError] = {}
        self._closed = False
        self._lock = threading.Lock()

    def run(self, layouts: Mapping[int, str]) -> None:
        """Run the shards of these layouts, by generation, and stop all others."""
        with self._lock:
            if self._closed:
                return
            for generation in self._running.keys() - layouts.keys():
                processes.stop(self._running.pop(generation), self._process.timings.stop)
                self._failed.pop(generation, None)
            if (reason := self._failed.get(min(layouts))) is not None:
                self._on_fatal(reason)
            for generation in sorted(layouts.keys() - self._running.keys()):
                self._running[generation] = []
                self._start_all(
                    self._process.model_copy(update={"layout": layouts[generation], "generation": generation})
                )

    def _start_all(self, process: ProcessConfig) -> None:
        layout, generation = process.replicated, process.generation
        for shard in process.local_shards:
            name = f"shard {shard} (stage {layout.stage(shard)}, ep_rank {layout.ep_rank(shard)})"
            if generation > 1:
                name = f"{name} of generation {generation}"

            def fail(reason: LoraServerError) -> None:
                self._failed[generation] = reason
                if generation == min(self._running, default=generation):
                    self._on_fatal(reason)
                else:
                    log.error(
                        "a shard of the new placement cannot be started", generation=generation, reason=str(reason)
                    )

            self._running[generation].append(self._start(name, process.model_copy(update={"shard": shard}), fail))

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
