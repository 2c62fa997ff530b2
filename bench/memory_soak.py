"""Checks answers and leaks of a server with many adapters, little memory, several engines, and shards that are killed.

    python -m bench.memory_soak [--json] [--adapters N] [--pool N] [--engines N] [--steps N] [--kills N] [--calm S]
                                [--host-pool N]

--pool and --host-pool are in mean adapters. One `lora-server serve` process over shared memory; the adapters are
links to twenty of mixed ranks and sites, their popularity is Zipf 1.2, and --device-pool holds --pool of them. Every
engine is a process that compares each of its steps with the same product in float64. The resources of the server's
processes (resident memory, descriptors, shared memory) are sampled throughout, and compared between the first and the
last tenth after a warm-up of a quarter. With --kills the shard is killed by SIGKILL that often at seeded moments while
it loads, each time after it has run for --calm seconds (its successor is forked after the imports). The server is back
when every engine has had a right answer since. No answer may be wrong; steps cut off by a kill fail with a typed error.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from rich.console import Console
from rich.progress import Progress

from bench import harness
from bench.harness import Child, as_json
from bench.memory_client import Job, Seen
from lora_server.demo import children, tiny
from lora_server.demo.launch import RunningServer

CONTENTS = 20
TARGETS = ("attention", "experts", "down", "all")
WARM_UP, EDGE = 0.25, 0.1
SAMPLE_SECONDS = 0.5
LIMIT_SECONDS = 3600.0


def make(work: Path, adapters: int) -> tuple[list[str], dict[str, str], int]:
    """Names by falling popularity, the contents by the ends of names, and the mean bytes of one."""
    model = tiny.make_model("mixtral")
    tiny.save_model(model, work / "base")
    sources = {}
    for seed in range(CONTENTS):
        path = work / "contents" / str(seed)
        tiny.make_adapter(model, path, lora_rank=1 + seed % 7, seed=seed, targets=TARGETS[seed % len(TARGETS)])
        sources[str(seed)] = str(path)
    (work / "adapters").mkdir()
    names = [f"tenant-{index}-{index % CONTENTS}" for index in range(adapters)]
    for name in names:
        (work / "adapters" / name).symlink_to(sources[name.rpartition("-")[2]])
    sizes = [(Path(path) / "adapter_model.safetensors").stat().st_size for path in sources.values()]
    return names, sources, round(statistics.mean(sizes))


class Engine(Child):
    """A process of bench.memory_client; a thread reads its newest line."""

    def __init__(self, job: Job, log: Path) -> None:
        self.seen = Seen()
        self._log = log.open("wb")
        super().__init__("bench.memory_client", as_json(job), stderr=self._log)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen = msgspec.json.decode(line, type=Seen)

    def enough(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> None:
        children.stop(self.process)
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            assert pipe is not None
            pipe.close()


class Held:
    """The resources of the server's processes over time: rows of resident bytes, descriptors and shared mappings."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.rows: list[tuple[float, int, int, int]] = []

    def sample(self) -> None:
        """Add one row; a process that is just dying counts as gone."""
        resident = descriptors = shared = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                resident += process.memory_info().rss
                descriptors += process.num_fds()
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                shared += sum("memfd:" in line or "/dev/shm/" in line for line in maps)
            except (psutil.Error, OSError):
                continue
        self.rows.append((time.time(), resident, descriptors, shared))

    def growth(self) -> dict[str, float]:
        """First and last tenth after the warm-up, medians."""
        rows = self.rows[int(len(self.rows) * WARM_UP) :]
        edge = max(1, int(len(rows) * EDGE))
        found = {}
        for column, name in ((1, "resident_mb"), (2, "descriptors"), (3, "shared_mappings")):
            first, last = (statistics.median(row[column] for row in part) for part in (rows[:edge], rows[-edge:]))
            scale = 1e6 if column == 1 else 1
            found |= {f"{name}_first": first / scale, f"{name}_last": last / scale}
        return found


def kill(server: RunningServer, engines: list[Engine], dice: random.Random, calm: float) -> dict[str, float]:
    """SIGKILL at a random moment while it loads; seconds until it is up, and until all engines had a right answer."""
    time.sleep(calm + dice.uniform(0.2, 1.5))
    (shard,) = harness.status(server.address).shards
    os.kill(shard.pid, signal.SIGKILL)
    killed, up = time.time(), 0.0
    running = [engine for engine in engines if not engine.seen.done]
    while any(engine.seen.last_right < killed + 0.001 for engine in running if engine.process.poll() is None):
        if not up:
            (now,) = harness.status(server.address).shards
            up = time.time() if now.state == "up" and now.pid != shard.pid else 0.0
        if time.time() > killed + 60:
            raise TimeoutError(f"no right answer within 60 s of a kill: {server.tail()}")
        time.sleep(0.02)
    return {"up_s": (up or time.time()) - killed, "right_s": time.time() - killed}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with harness.scratch() as work:
        names, sources, mean = make(work, options.adapters)
        flags = ["--device-pool", str(mean * options.pool), "--host-pool", str(mean * options.host_pool)]
        flags += ["--eviction", options.eviction]
        with harness.serving(work, *flags) as server:
            (began_pid,) = [shard.pid for shard in harness.status(server.address).shards]
            engines = [
                Engine(
                    Job(server.address, names, sources, options.steps // options.engines, seed),
                    work / f"engine-{seed}",
                )
                for seed in range(options.engines)
            ]
            try:
                found = _watch(server, engines, options)
            finally:
                for engine in engines:
                    engine.stop()
            found |= _after(server.address, began_pid)
        found["errors_text"] = sorted({line for seed in range(options.engines) for line in _errors(work, seed)})[:10]
    return found


def _errors(work: Path, seed: int) -> list[str]:
    lines = (work / f"engine-{seed}").read_text(errors="replace").splitlines()
    return [line[:300] for line in lines if line.startswith("{") or "Error" in line]


def _watch(server: RunningServer, engines: list[Engine], options: argparse.Namespace) -> dict[str, Any]:
    held, dice, kills = Held(server.process.pid), random.Random(options.seed), []
    stop, told = threading.Event(), False

    def watch() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            held.sample()

    threading.Thread(target=watch, daemon=True).start()
    deadline, began = time.time() + LIMIT_SECONDS, time.time()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("stepping", total=options.steps)
        while not all(engine.seen.done for engine in engines):
            progress.update(task, completed=sum(engine.seen.steps for engine in engines))
            if any(engine.process.poll() for engine in engines) or time.time() > deadline:
                raise RuntimeError("an engine died, or nothing comes any more")
            if len(kills) < options.kills and all(engine.seen.steps for engine in engines):
                kills.append(kill(server, engines, dice, options.calm))
            if len(kills) == options.kills and not told:
                told = True
                for engine in engines:
                    engine.enough()
            time.sleep(0.1)
    stop.set()
    seen = [engine.seen for engine in engines]
    errors = Counter[str]()
    for one in seen:
        errors.update(one.errors)
    return {
        "steps": sum(one.steps for one in seen),
        "seconds": time.time() - began,
        "wrong": sum(one.wrong for one in seen),
        "worst_error": max(one.worst for one in seen),
        "slowest_step_s": max(one.slowest for one in seen),
        "errors": errors,
        "kills": kills,
        **held.growth(),
    }


def _after(address: str, pid: int) -> dict[str, Any]:
    """Read, once all engines have left, the remaining leases, the pool's bytes, and the number of ready adapters."""
    deadline = time.time() + 30
    while (reply := harness.status(address)).clients and time.time() < deadline:
        time.sleep(0.2)
    time.sleep(1.5)  # the next report
    listed = harness.listed(address)
    (shard,) = harness.status(address).shards
    return {
        "leases_left": reply.clients,
        "holders_left": sum(one.holders for one in listed),
        "restarts": shard.restarts,
        "loads": shard.stats.loads,
        "evictions": shard.stats.evictions,
        "loaded_mb": shard.stats.loaded_bytes / 1e6,
        "pool_used_mb": shard.stats.weight_bytes / 1e6,
        "pool_mb": shard.stats.total_bytes / 1e6,
        "ready": sum(one.state == "ready" for one in listed),
        "failed": sum(one.state == "failed" for one in listed),
    }


def main() -> None:
    given = harness.flags(
        __doc__,
        adapters=2000,
        pool=100,
        host_pool=0,
        engines=4,
        steps=20_000,
        kills=0,
        calm=0.0,
        seed=0,
        eviction="lru",
    )
    torch.set_grad_enabled(False)
    found = measure(given)
    lines = [
        {"what": key, "seen": f"{value:,.3f}" if isinstance(value, float) else str(value)}
        for key, value in found.items()
        if key != "kills"
    ]
    for name in ("up_s", "right_s"):
        times = sorted(one[name] for one in found["kills"]) or [0.0]
        seen = f"median {statistics.median(times):.2f}, most {times[-1]:.2f}"
        lines.append({"what": f"{len(found['kills'])} kills: {name}", "seen": seen})
    title = f"{given.adapters:,} adapters, a pool for {given.pool}"
    harness.show(given, found, harness.table(title, lines, "what {what} | seen {seen}"))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
