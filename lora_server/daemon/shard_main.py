"""One shard process; see processes for how it is started and stopped.

The main thread runs the loop; threads serve the controller's stream, listeners and the loader.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import structlog
import torch

from lora_server.access.tls import own_credentials
from lora_server.config import ProcessConfig
from lora_server.control.members.agreement import Agreement
from lora_server.daemon.child_main import open_fetcher, run_child
from lora_server.daemon.files import Node0
from lora_server.daemon.processes import EXIT_REFUSED, Up, say
from lora_server.daemon.run_directory import DirectoryUse
from lora_server.daemon.shard_commands import ShardCommands
from lora_server.daemon.shard_parts import OnGone, ServingParts, ShardListeners
from lora_server.daemon.shard_reports import ShardReports
from lora_server.daemon.stream import ControllerStream
from lora_server.daemon.watchdog import LoopWatchdog
from lora_server.errors import LeaseError
from lora_server.placement import Placement
from lora_server.sources.fetch import Fetcher
from lora_server.spec import ModelSpec
from lora_server.wire import lora_server_pb2 as pb

SWITCH_SECONDS = 1e-4  # the loop must get the GIL back quickly from a loading thread, and give it when it spins
log = structlog.get_logger()


class ShardProcess:
    """A shard: the object that puts all its parts together."""

    def __init__(
        self,
        config: ProcessConfig,
        listen: Callable[[ProcessConfig, ModelSpec, OnGone], ShardListeners] = ShardListeners,
        build: Callable[[ProcessConfig, Placement, ShardListeners, Fetcher], ServingParts] = ServingParts,
    ) -> None:
        self._began = time.monotonic()
        torch.set_num_threads(config.threads)
        torch.set_grad_enabled(False)
        sys.setswitchinterval(SWITCH_SECONDS)
        self.config = config
        self._directory = DirectoryUse(config.run_dir)
        spec, layout, timings = ModelSpec.from_json(config.spec_json), config.replicated, config.timings
        digest = Agreement.of(config, spec).digest()
        self.stopping = threading.Event()
        self.exit_code = 0
        self.listeners = listen(config, spec, self._client_gone)
        port, controller, credentials = self.listeners.port, str(config.controller), own_credentials(config)
        self.stream = ControllerStream(
            controller,
            credentials,
            lambda: self._registration(digest),
            lambda command, done: self._commands.execute(command, done),
            lambda handle: self.parts.shard.store.report.layers_ready(handle),
            timings,
        )
        fetcher = open_fetcher(
            config, spec, Node0(controller, credentials, config.shard, self.stream.instance, timings).files
        )
        self.parts = parts = build(config, Placement(spec, layout), self.listeners, fetcher)
        parts.shard.store.adapters.note_disk(fetcher.cache.versions())  # before it is told to load any
        self._reports = ShardReports(parts.shard, port, parts.coordinator, fetcher, self.stream.report, timings)
        self._commands = ShardCommands(
            config.node_rank > 0 or config.has_standby,
            port,
            parts.shard.store,
            parts.coordinator,
            parts.world,
            self._reports.moved,
            self.stop,
            timings.expected_step,
        )

    def run(self) -> int:
        """Serve until stopped; return the exit code."""
        threading.Thread(target=self._follow_controller, daemon=True, name="controller").start()
        threading.Thread(target=self._reports.run, args=(self.stopping,), daemon=True, name="stats").start()
        following = self.parts.layers_moved, self.stopping
        threading.Thread(target=self._reports.follow, args=following, daemon=True, name="residency").start()
        watchdog = LoopWatchdog(self.config.timings.hung)
        threading.Thread(target=watchdog.run, args=(self.stopping,), daemon=True, name="watchdog").start()
        self.parts.shard.run(watchdog.counting(self.stopping.is_set))
        self.listeners.close()
        self.parts.coordinator.close()
        self.parts.shard.store.close()
        self.stream.leave(self.config.timings.shard_leave)
        self._directory.end()
        log.info("shard stopped", shard=self.config.shard)
        return self.exit_code

    def stop(self) -> None:
        """Stop `run`, from any thread."""
        self.stopping.set()
        self.listeners.port.ring()

    def _follow_controller(self) -> None:
        threading.Thread(target=self._say_up, daemon=True, name="up").start()
        refused = self.stream.run(self.stopping)
        if refused is not None:
            if not isinstance(refused, LeaseError):  # that rank is another's now: this one ends, and may come again
                say(Up(refused=str(refused)))
                self.exit_code = EXIT_REFUSED
            self.stop()

    def _say_up(self) -> None:
        self.stream.up.wait()
        log.info("shard started", shard=self.config.shard, seconds=round(time.monotonic() - self._began, 2))
        say(Up())

    # -- to and from the controller

    def _client_gone(self, client: int, epoch: int) -> None:
        self.stream.report(pb.ShardReport(client_gone=pb.ClientGone(client=client, epoch=epoch)))

    def _registration(self, digest: str) -> pb.Registration:
        config, parts = self.config, self.parts
        return pb.Registration(
            shard=config.shard,
            node=config.node_rank,
            generation=config.generation,
            pid=os.getpid(),
            agreement_digest=digest,
            endpoint=self.listeners.endpoint,
            pool_bytes=parts.shard.store.tier.pool.capacity,
            order_address=parts.coordinator.address,
            order_badge=parts.coordinator.badge,
            place=parts.world.place if parts.world is not None else None,
        )


def main() -> None:
    """Entry point of a shard's process, after the fork."""
    run_child(ShardProcess)
