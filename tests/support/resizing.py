"""Servers that are resized, and what tests look at meanwhile."""

from tests.support.serving import cli, descendants, is_gone, name_of, status


def resize(address, layout, *more):
    return cli("resize", "--layout", layout, "--server", address, "--json", *more)


def placed(address):
    reply = status(address)
    return reply.layout, reply.generation


def children_of(server):
    """The shards' processes of a node."""
    family = descendants(server.process.pid)
    return [one for one in family if name_of(one).startswith("lora-shard") and not is_gone(one)]
