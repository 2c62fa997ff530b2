"""`--launcher ray`: each node of a server is an actor of a Ray cluster (ray_node.py), on a host of its own.

Ray starts an actor again, on another host where its own is gone. An old host may serve on after Ray gave it up: then
its shards keep their ranks, and those of the new host wait for them, as of any node that claims a rank of another.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
import structlog
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lora_server.config import ServeConfig
from lora_server.daemon.checks import check_start, node_secret
from lora_server.daemon.ray_node import ASK_SECONDS, LOOK_SECONDS, NAMESPACE, NodeActor, name_of
from lora_server.daemon.signals import on_signals
from lora_server.errors import ConfigError, LoraServerError
from lora_server.placement import share

log = structlog.get_logger()


class RayServer:
    """The actors of a server, and their placement group."""

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._name = config, f"lora-server-{config.listen.port}"
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self, stop: threading.Event) -> None:
        """Start the nodes, or take over those that a launcher which was killed left. Returns early once `stop` is set.

        Raises ConfigError for too few hosts, or where another server has the name.
        """
        self._group = self._place(stop)
        if self._group is None:
            return
        settings, secret = self._config.model_dump_json(), node_secret(self._config)
        self._actors = [self._start(rank, settings, secret) for rank in range(self._config.nodes)]
        asked, started = [actor.settings.remote() for actor in self._actors], list[Any]()
        while len(started) < len(asked) and not stop.is_set():
            started, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_SECONDS)
        if any(ray.get(one) != settings for one in started):
            self._actors, self._group = [], None  # another's
            raise ConfigError(
                f"--launcher ray: got settings that are not those of the server {self._name}, which runs in this Ray "
                "cluster, expected the same to take it over: give another --listen port, or end that server first, by "
                "its command and Ctrl-C"
            )

    def _place(self, stop: threading.Event) -> Any:
        """Return the placement group; None once `stop` is set."""
        with suppress(ValueError):  # there is none of this name
            return get_placement_group(self._name)
        nodes, seconds = self._config.nodes, self._config.controller_seconds
        bundles = [_resources(self._config, rank) for rank in range(nodes)]
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=self._name, lifetime="detached")
        deadline = time.monotonic() + seconds
        while not group.wait(LOOK_SECONDS):
            if stop.is_set() or time.monotonic() > deadline:
                remove_placement_group(group)
                if stop.is_set():
                    return None
                raise ConfigError(
                    f"--launcher ray: got no {nodes} hosts with {bundles[0]} free within {seconds:g} s, expected one "
                    "per node: add hosts to the Ray cluster, or give fewer --nodes (ray status shows what is free)"
                )
        return group

    def _start(self, rank: int, settings: str, secret: str) -> Any:
        resources = _resources(self._config, rank)
        options = {
            "name": name_of(self._name, rank),
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": 0,
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
        }
        return ray.remote(NodeActor).options(**options).remote(self._name, settings, secret, rank)

    def watch(self, stop: threading.Event) -> None:
        """Wait until `stop` is set. Raises LoraServerError if a node refuses its settings."""
        log.info("nodes started on Ray", name=self._name, nodes=self._config.nodes, controller=self._controller())
        self._warn_of_niceness()
        while not stop.wait(LOOK_SECONDS):
            with suppress(RayError):  # a host is away: Ray starts its actor again
                answers = [actor.is_hopeless.remote() for actor in self._actors]
                if any(ray.get(answers, timeout=ASK_SECONDS)):
                    raise LoraServerError("--launcher ray: a node refuses its settings; see its error above")

    def _warn_of_niceness(self) -> None:
        with suppress(RayError):
            asked = [actor.niceness.remote() for actor in self._actors]
            if any(ray.get(asked, timeout=ASK_SECONDS)):
                log.warning("Ray runs the nodes behind every other process; start it with RAY_worker_niceness=0")

    def _controller(self) -> str:
        with suppress(RayError):
            return str(ray.get(self._actors[0].controller.remote(), timeout=ASK_SECONDS))
        return "unknown yet"

    def close(self) -> None:
        """Stop the nodes, and remove actors and placement group."""
        with suppress(RayError):
            stopped = [actor.stop.remote() for actor in self._actors]
            ray.wait(stopped, num_returns=len(stopped), timeout=ASK_SECONDS + self._config.timings.stop)
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)


def serve_on_ray(config: ServeConfig) -> None:
    """Run a server in a Ray cluster until SIGINT or SIGTERM. Raises ConfigError where there is no cluster."""
    check_start(config)
    stop = threading.Event()
    try:
        ray.init(os.environ.get("RAY_ADDRESS", "auto"), namespace=NAMESPACE, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--launcher ray: no Ray cluster can be reached ({str(error).splitlines()[0]}); expected one that runs: "
            "ray start --head, or RAY_ADDRESS=HOST:6379"
        ) from error
    on_signals((signal.SIGINT, signal.SIGTERM), stop.set)  # after Ray has set its own
    server = RayServer(config)
    try:
        server.start(stop)
        server.watch(stop)
    finally:
        server.close()
        ray.shutdown()


def _resources(config: ServeConfig, rank: int) -> Mapping[str, float]:
    """Return what a node takes of its host: CPUs, and a GPU per shard."""
    shards = len(share(config.replicated.num_shards, config.nodes, rank))
    gpus = {"GPU": float(shards)} if config.device == "cuda" else {}
    return {"CPU": float(shards * config.threads)} | gpus
