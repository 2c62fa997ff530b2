"""A server of one shard per node over hosts of a switch, with TLS, and engines on hosts of their own."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from lora_server.demo.launch import RunningServer, launch
from tests.support.certificates import Authority
from tests.support.fleet import Fleet, now
from tests.support.hosts import Host, Switch
from tests.support.serving import all_gone, complete, descendants, kill, status, stop, suspended, until
from tests.support.workload import Workload

NODES, ENGINES = 4, 2
SILENCE_SECONDS = 6.0  # of leases, and of silent shards
BACK_SECONDS = 240.0  # for all to be right again, where a node starts anew
STEP_SECONDS = 4.0  # an engine's timeout


class Cluster:
    """`at` are the hosts of the nodes, by rank; `engines` check every answer."""

    def __init__(self, directory: Path, load: Workload, switch: Switch, *flags: str) -> None:
        """Start the nodes. `flags`: more of `serve`, for each of them."""
        self.directory, self.load, self.switch, self.flags = directory, load, switch, flags
        self.authority = Authority(directory)
        os.environ["LORA_SERVER_TLS_CA"] = str(self.authority.ca)  # of engines, and of this process
        self.at = [switch.host() for _ in range(NODES)]
        self.engines_at = [switch.host() for _ in range(ENGINES)]
        self.nodes: list[RunningServer] = []
        for rank, host in enumerate(self.at):
            self.nodes.append(self.start(rank, host))

    @property
    def address(self) -> str:
        """The address of node 0."""
        return self.nodes[0].address

    def start(self, rank: int, host: Host, *more: str) -> RunningServer:
        """Start a node on a host; does not wait."""
        load, number = self.load, len(list(self.directory.glob("log*")))
        certificate, key = self.authority.issue(f"node{number}", address=host.address)
        data = self.directory / f"data {rank} {host.address}"
        flags = ["--base-model", str(load.base), "--layout", "ep2-pp2", "--nodes", str(NODES), "--node-rank", str(rank)]
        flags += ["--tls-cert", str(certificate), "--tls-key", str(key), "--tls-ca", str(self.authority.ca)]
        flags += ["--insecure", "--lease-seconds", str(SILENCE_SECONDS), "--data-dir", str(data)]
        own = ["--controller", self.address] if rank else ["--adapters", str(load.adapters)]
        flags += [*self.flags, *own, *more]
        return launch(self.directory / f"log{number}", *flags, host=host.address, prefix=host.prefix)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        codes = self.stop()
        assert kind is not None or codes == [0] * NODES

    def wait_ready(self, seconds: float = BACK_SECONDS) -> None:
        """Wait until every shard is up and the server admits requests."""

        def is_ready() -> bool:
            reply = complete(self.address)
            return reply is not None and {one.state for one in reply.shards} == {"up"}

        until(is_ready, "every shard is up", seconds)

    def fleet(self, scratch: Path, each: int = 1, **how: object) -> Fleet:
        """Start engines, so many on each of their hosts; `how`: of Fleet."""
        wheres = [host.prefix for host in self.engines_at for _ in range(each)]
        how = {"prefixes": wheres, "timeout": STEP_SECONDS, **how}
        self.engines = Fleet(self.load, self.address, scratch, ("tcp",) * len(wheres), **how)
        return self.engines

    def heals(self) -> float:
        """Wait until every engine is right and every shard is up; return the seconds until the slowest was right."""
        slowest = self.engines.all_right_again(now(), BACK_SECONDS)
        self.wait_ready()
        self.engines.check()
        return slowest

    def replace(self, rank: int, host: Host) -> None:
        """Start a node in the place of one that is gone, on another host."""
        self.nodes[rank], self.at[rank] = self.start(rank, host), host

    def restart_first(self) -> None:
        """Start node 0 again, with its address, flags and disk."""
        ports = {"--listen": self.nodes[0].address, "--http": self.nodes[0].http}
        again = self.start(0, self.at[0], *(word for pair in ports.items() for word in pair))
        again.address, again.http = self.nodes[0].address, self.nodes[0].http
        self.nodes[0] = again

    def states(self) -> list[str]:
        """The state of every shard."""
        return [one.state for one in status(self.address).shards]

    def stopped(self, rank: int) -> AbstractContextManager[None]:
        """Stop all processes of a node where they are, for a block."""
        root = self.nodes[rank].process.pid
        return suspended(root, *(one.pid for one in descendants(root)))

    def shards(self) -> list[tuple[int, int]]:
        """The node and the process of every shard."""
        return [(one.node, one.pid) for one in status(self.address).shards]

    def stop(self) -> Sequence[int]:
        """End all nodes, node 0 last; returns exit codes."""
        family = [one for node in self.nodes for one in descendants(node.process.pid)]
        codes = [stop(node) for node in reversed(self.nodes)]
        all_gone(family)
        os.environ.pop("LORA_SERVER_TLS_CA")
        return codes


def any_fault(cluster: Cluster, chance: random.Random) -> str:
    """Cut a host off for seconds, stop its processes for as long, kill it, or replace it; return what was done."""
    rank = chance.randrange(NODES)
    kind = chance.choice(["cut", "cut an engine", "stop", "kill", "replace"])
    time.sleep(chance.uniform(0, 1))  # engines are anywhere in a step
    seconds = chance.uniform(0.1, 8)  # the outage itself
    if kind == "stop":
        with cluster.stopped(rank):
            time.sleep(seconds)
    elif kind.startswith("cut"):
        with (chance.choice(cluster.engines_at) if kind == "cut an engine" else cluster.at[rank]).is_cut():
            time.sleep(seconds)
    else:
        kill(cluster.nodes[rank])
        if rank:
            cluster.replace(rank, cluster.switch.host() if kind == "replace" else cluster.at[rank])
        else:
            cluster.restart_first()
    return f"{kind} {rank}"
