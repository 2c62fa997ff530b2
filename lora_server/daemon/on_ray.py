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
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lora_server.config import ServeConfig
from lora_server.daemon.checks import check_start, node_secret
from lora_server.daemon.ray_node import ASK_SECONDS, LOOK_SECONDS, NAMESPACE, NodeActor, name_of
from lora_server.daemon.signals import on_signals
from lora_server.errors import ConfigError, LoraServerError
from lora_server.placement import share

log = structlog.get_logger()


class RayServer:
    """The actors of a server, and their placement group: none of another server, so that `close` ends none of it."""

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._name = config, f"lora-server-{config.listen.port}"
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self, stop: threading.Event) -> None:
        """Start the nodes, or take over those that a launcher which was killed left. Returns early once `stop` is set.

        Raises ConfigError for too few hosts, or where another server has the name, LoraServerError if node 0 of a
        server that runs does not answer.
        """
        group, is_own = self._place(stop)
        if group is None:
            return
        settings, secret = self._config.model_dump_json(), node_secret(self._config)
        first = self._start(group, 0, settings, secret)
        if is_own:
            self._group, self._actors = group, [first]
        self._compare(first, settings, stop)
        if stop.is_set():
            return
        others = [self._start(group, rank, settings, secret) for rank in range(1, self._config.nodes)]
        self._group, self._actors = group, [first, *others]
        asked, started = [actor.settings.remote() for actor in others], list[Any]()
        while len(started) < len(asked) and not stop.is_set():
            started, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_SECONDS)

    def _compare(self, first: Any, settings: str, stop: threading.Event) -> None:
        """Wait for node 0, and compare its settings with ours, unless `stop` is set."""
        asked, started = [first.settings.remote()], list[Any]()
        while not started and not stop.is_set():
            started, _ = ray.wait(asked, timeout=LOOK_SECONDS)
        try:
            theirs = ray.get(started)
        except RayError as error:
            reason = str(error).partition("\n")[0]
            raise LoraServerError(
                f"--launcher ray: node 0 of {self._name} does not answer ({reason}), expected its settings: its "
                "host may be away; give the command again once Ray has started it elsewhere"
            ) from error
        if theirs not in ([], [settings]):
            self._actors, self._group = [], None  # another's
            raise ConfigError(
                f"--launcher ray: got settings that are not those of the server {self._name}, which runs in this Ray "
                "cluster, expected the same to take it over: give another --listen port, or end that server first, by "
                "its command and Ctrl-C"
            )

    def _place(self, stop: threading.Event) -> tuple[Any, bool]:
        """Return the placement group, None once `stop` is set, and whether this command made it."""
        nodes, seconds, is_own = self._config.nodes, self._config.controller_seconds, False
        bundles = [_resources(self._config, rank) for rank in range(nodes)]
        try:
            group = get_placement_group(self._name)
        except ValueError:  # there is none of this name
            group = placement_group(bundles, strategy="STRICT_SPREAD", name=self._name, lifetime="detached")
            is_own = True
        deadline = time.monotonic() + seconds
        while not group.wait(LOOK_SECONDS) and not _has_run(group):
            is_late = time.monotonic() > deadline
            if stop.is_set() or is_late:
                if is_own or is_late:  # its launcher was killed
                    remove_placement_group(group)
                if stop.is_set():
                    return None, is_own
                raise ConfigError(
                    f"--launcher ray: got no {nodes} hosts with {bundles[0]} free within {seconds:g} s, expected one "
                    "per node: add hosts to the Ray cluster, or give fewer --nodes (ray status shows what is free)"
                )
        return group, is_own

    def _start(self, group: Any, rank: int, settings: str, secret: str) -> Any:
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
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        }
        return ray.remote(NodeActor).options(**options).remote(self._name, settings, secret, rank)

    def watch(self, stop: threading.Event) -> None:
        """Wait until `stop` is set. Raises LoraServerError if a node refuses its settings."""
        log.info("nodes started on Ray", name=self._name, nodes=self._config.nodes, controller=self._controller())
        if any(self._ask("niceness")):
            log.warning("Ray runs the nodes behind every other process; start it with RAY_worker_niceness=0")
        while not stop.wait(LOOK_SECONDS):
            if any(self._ask("is_hopeless")):
                raise LoraServerError("--launcher ray: a node refuses its settings; see its error above")

    def _ask(self, method: str) -> list[Any]:
        """Return what the nodes answer, but for those whose host is away: Ray starts their actors again."""
        asked, answers = [getattr(actor, method).remote() for actor in self._actors], list[Any]()
        came, _ = ray.wait(asked, num_returns=len(asked), timeout=ASK_SECONDS)
        for one in came:
            with suppress(RayError):
                answers.append(ray.get(one))
        return answers

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
        if not stop.is_set():
            server.watch(stop)
    finally:
        server.close()
        ray.shutdown()


def _has_run(group: Any) -> bool:
    """Return whether a placement group has had its hosts, though one may be gone by now."""
    return bool(placement_group_table(group).get("state") == "RESCHEDULING")


def _resources(config: ServeConfig, rank: int) -> Mapping[str, float]:
    """Return what a node takes of its host: CPUs, and a GPU per shard."""
    shards = len(share(config.replicated.num_shards, config.nodes, rank))
    gpus = {"GPU": float(shards)} if config.device == "cuda" else {}
    return {"CPU": float(shards * config.threads)} | gpus
