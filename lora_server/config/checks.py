"""Checks of several settings together. Each raises ValueError: flag, got, expected."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from lora_server.address import Address
from lora_server.placement import Layout, share
from lora_server.ports import HIGHEST, DataPorts
from lora_server.units import Size

MOST_LED = 33  # shards of a stage: its leader's kernel tells shard.numbers.MAX_FOLLOWERS others


def check_leaders(layout: Layout, nodes: int, gpu_transport: str) -> None:
    """A leader's kernel writes into its followers' memory, so all shards of a stage must be on one host."""
    stages = [[layout.stage(one) for one in share(layout.num_shards, nodes, i)] for i in range(nodes)]
    if gpu_transport == "nvshmem" or sum(len(set(one)) for one in stages) > layout.pp:
        raise ValueError(
            f"--coordination: got leader with --gpu-transport {gpu_transport}, --layout {layout} and --nodes {nodes}; "
            "expected --gpu-transport gpu and every stage on one node, or --coordination independent"
        )
    if layout.ep > MOST_LED:
        raise ValueError(f"--coordination: got leader with --layout {layout}, expected at most ep{MOST_LED}")


def check_replicas(replicas: int, nodes: int, gpu_transport: str, coordination: str, device_pool: Size) -> None:
    """Twins are on different nodes, have equal pools, and each answers steps by itself."""
    if replicas == 1:
        return
    if replicas > nodes:
        raise ValueError(
            f"--replicas: got {replicas} with --nodes {nodes}, expected at most as many as nodes: the twins of a "
            "shard are on different nodes"
        )
    if gpu_transport != "cuda_ipc" or coordination == "leader":
        raise ValueError(
            f"--replicas: got {replicas} with --gpu-transport {gpu_transport} and --coordination {coordination}, "
            "expected 1, or cuda_ipc and independent: a step is sent again by the engine's host, shard by shard"
        )
    if device_pool.share:
        raise ValueError(
            f"--replicas: got {replicas} with --device-pool {device_pool}, a share of what is free, expected bytes "
            "such as 40GiB: an adapter that fits a shard must fit its twins"
        )


def check_ports(ports: DataPorts, layout: str, own: Mapping[str, Address]) -> None:
    """`own`: the flags of the addresses that this node listens on."""
    span = ports.span()
    if span and span[-1] > HIGHEST:
        raise ValueError(
            f"--data-port-base: got {span[0]}, expected at most {HIGHEST + 1 - len(span)}: {layout} needs {len(span)} "
            "ports from there on"
        )
    for (flag, address), (other, taken) in combinations(own.items(), 2):
        if address.meets(taken):
            raise ValueError(f"{flag}: got {address}, expected another port than that of {other} {taken}")
    for flag, address in own.items():
        if address.port in span:
            raise ValueError(
                f"{flag}: got {address}, expected a port outside {span[0]} to {span[-1]}, which --data-port-base "
                f"reserves for {layout}: choose another port, or another base"
            )
