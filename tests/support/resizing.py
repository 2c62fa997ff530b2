"""Servers that are resized, and what tests look at meanwhile."""

import contextlib

import psutil

from tests.support.serving import cli, status


def resize(address, layout, *more):
    return cli("resize", "--layout", layout, "--server", address, "--json", *more)


def placed(address):
    reply = status(address)
    return reply.layout, reply.generation


def shards(address):
    return [psutil.Process(one.pid) for one in status(address).shards]


def children_of(server):
    """The shards' processes of a node."""
    found = []
    for one in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name().startswith("lora-shard") and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found
