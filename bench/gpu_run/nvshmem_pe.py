"""One PE of the stage `nvshmem`: `python -m bench.gpu_run.nvshmem_pe RANK WORLD MODULE`.

It says {"event": ...} on stdout and does what lines on stdin tell it, with rank 0's unique id first:

    {"uid": hex}                      -> "module", then "ready": initialised, memory there, signals zero
    {"do": "put", "turn": n}          -> "put": bytes of (rank, n) to the next PE, and n to its signal
    {"do": "wait", "turn": n}         -> "waited": ns until the PE before has signalled n or -1; whether its bytes came
    {"do": "context"}                 -> "context": whether this process can still compute

It never finalises NVSHMEM: a PE would hang there if its neighbours have died.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.gpu_run.child import context, say

NBYTES = 1 << 20
UID_BYTES = 128
THREADS = 256
LIMIT_NS = 500_000_000


def pattern(rank: int, turn: int) -> int:
    """The byte that a PE sends in a turn."""
    return (rank * 16 + turn) % 251 + 1


class Pe:
    """One initialised PE. Only the constructor waits for the progress of other PEs."""

    def __init__(self, rank: int, world: int, uid: bytes, module: bytes) -> None:
        import cupy
        from nvshmem import bindings

        self.rank, self.world, self.cupy = rank, world, cupy
        cupy.cuda.Device(0).use()
        cupy.zeros(1)  # a context
        _initialise(bindings, rank, world, uid)
        self.module = cupy.cuda.function.Module()
        self.module.load(module)
        status = bindings.cumodule_init(self.module.ptr)
        say("module", status=int(status or 0), pe=int(bindings.my_pe()), pes=int(bindings.n_pes()))
        self.rows, self.signal = bindings.malloc(NBYTES), bindings.malloc(8)
        self.peer_is_mapped = bool(bindings.ptr(self.rows, self.next))
        self.source = cupy.empty(NBYTES, cupy.uint8)
        self.took = cupy.zeros(1, cupy.int64)
        self.view = _view(cupy, self.rows, NBYTES)
        self.view.fill(0)
        _view(cupy, self.signal, 8).fill(0)
        cupy.cuda.runtime.deviceSynchronize()

    @property
    def next(self) -> int:
        """The rank of the PE that it sends to."""
        return (self.rank + 1) % self.world

    def put(self, turn: int) -> None:
        """One block of threads; waits until it is done here."""
        u64 = self.cupy.uint64
        self.source.fill(pattern(self.rank, turn))
        arguments = (u64(self.rows), u64(self.source.data.ptr), u64(NBYTES), u64(self.signal), u64(turn))
        self.module.get_function("put")((1,), (THREADS,), (*arguments, self.cupy.int32(self.next)))
        self.cupy.cuda.runtime.deviceSynchronize()

    def wait(self, turn: int) -> tuple[int, bool]:
        """(ns or -1, whether all bytes are those of the PE before)."""
        u64 = self.cupy.uint64
        arguments = (u64(self.signal), u64(turn), self.cupy.int64(LIMIT_NS), u64(self.took.data.ptr))
        self.module.get_function("wait")((1,), (1,), arguments)
        self.cupy.cuda.runtime.deviceSynchronize()
        before = pattern((self.rank - 1) % self.world, turn)
        return int(self.took[0]), bool((self.view == before).all())


def _initialise(bindings: Any, rank: int, world: int, uid: bytes) -> None:
    unique, attributes = bindings.uniqueid(), bindings.InitAttr()
    ctypes.memmove(unique.ptr, uid, UID_BYTES)
    attributes.version = (1 << 16) + bindings.init_attr_dtype.itemsize  # NVSHMEMX_INIT_ATTR_INITIALIZER
    bindings.set_attr_uniqueid_args(rank, world, unique.ptr, attributes.ptr)
    bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)


def _view(cupy: Any, pointer: int, nbytes: int) -> Any:
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, nbytes, None, 0), 0)
    return cupy.ndarray((nbytes,), cupy.uint8, memory)


def load() -> None:
    """Load NVSHMEM's host library before any module asks for it."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    load_nvidia_dynamic_lib("nvshmem_host")


def new_uid() -> bytes:
    """A unique id; no GPU is asked."""
    from nvshmem import bindings

    unique = bindings.uniqueid()
    bindings.get_uniqueid(unique.ptr)
    return ctypes.string_at(unique.ptr, UID_BYTES)


def obey(pe: Pe, command: dict[str, Any]) -> None:
    """One line of stdin."""
    import torch

    if command["do"] == "put":
        pe.put(command["turn"])
        say("put")
    elif command["do"] == "wait":
        took, right = pe.wait(command["turn"])
        say("waited", took_ns=took, right=right)
    else:
        say("context", state=context(torch.device("cuda", 0)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("module", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    """Obey the lines of stdin until it ends."""
    given = parse()
    load()
    if given.rank == 0:
        say("uid", uid=new_uid().hex())
    uid = bytes.fromhex(json.loads(sys.stdin.readline())["uid"])
    pe = Pe(given.rank, given.world, uid, given.module.read_bytes())
    say("ready", peer_is_mapped=pe.peer_is_mapped)
    for line in sys.stdin:
        try:
            obey(pe, json.loads(line))
        except Exception as problem:
            say("failed", reason=f"{type(problem).__name__}: {problem}"[:300])
    os._exit(0)


if __name__ == "__main__":
    main()
