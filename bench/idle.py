"""What idle clients cost a step: `python -m bench.idle [--clients 1 16 64 256]`.

A server of one shard and an engine that computes one token at a time. Blocks without and with so many other clients,
which have joined, hold nothing and push nothing, follow each other: each block with them stands between two without.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.many_adapters import make
from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server.demo.launch import running_server

CLIENTS, BLOCKS, PASSES, WARM_UP = (1, 16, 64, 256), 5, 60, 10
TOKEN = torch.tensor([[5]])


def pass_ms(model: torch.nn.Module) -> float:
    """The median of a forward pass: a step per site of four layers."""
    taken = []
    for _ in range(PASSES):
        began = time.perf_counter()
        model(TOKEN)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_UP:]) * 1e3


@contextlib.contextmanager
def idle(address: str, count: int) -> Iterator[None]:
    """So many sessions, with links to the shard."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(RemoteServer(address).join().leave)
        yield


def measure(clients: list[int]) -> dict[int, tuple[float, float]]:
    """By number of idle clients: ms of a pass without them, and with."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        model = make(Path(scratch), 1)
        flags = ["--base-model", f"{scratch}/base", "--adapters", f"{scratch}/adapters", "--lease-seconds", "60"]
        with (
            running_server(Path(scratch, "log"), flags) as server,
            attach(model, server=server.address, transport="shm") as lora,
            lora.adapters(["a00000"]),
        ):
            for count in clients:
                alone, beside = [pass_ms(model)], []
                for _ in range(BLOCKS):
                    with idle(server.address, count):
                        beside.append(pass_ms(model))
                    alone.append(pass_ms(model))
                found[count] = min(alone), min(beside)
    return found


def main() -> None:
    """A table: the least of the blocks' medians, so that others' work on the machine counts least."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    table = Table("idle clients", "pass alone, ms", "beside them, ms", "ratio")
    for count, (alone, beside) in measure(parser.parse_args().clients).items():
        table.add_row(str(count), f"{alone:.3f}", f"{beside:.3f}", f"{beside / alone:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
