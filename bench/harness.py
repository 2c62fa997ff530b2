"""Helpers for benches: flags, tables and one JSON document, servers of tiny models, child processes, waits."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lora_server.demo import children, tiny
from lora_server.demo.launch import RunningServer, running_server
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.listing import all_pages
from lora_server.wire.rpc import open_channel

T = TypeVar("T")
POLL_SECONDS = 0.05
CONTENTS = 20  # of which all adapters of make_many are


def flags(about: str | None, *, json: bool = True, **defaults: Any) -> argparse.Namespace:
    """Parse `--json`, unless the bench has none, and one flag per keyword, which has the type of its default.

    A default that is a type stands for None, `[type]` for an empty list, and a tuple for None or one of its texts.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if json:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, list):
            empty = isinstance(default[0], type)
            kind = default[0] if empty else type(default[0])
            parser.add_argument(flag, type=kind, nargs="*", default=[] if empty else default)
        else:
            kind = Path if isinstance(default, Path) else type(default)
            parser.add_argument(flag, type=kind, default=default, help="default: %(default)s")
    return parser.parse_args()


class _Facts(dict[str, Any]):
    def __missing__(self, key: str) -> float:
        return float("nan")


def table(title: str, rows: Iterable[Mapping[str, Any]], columns: str) -> Table:
    """Build a table; `columns` are headers with templates, such as "model {name} | us {median_us:.1f}".

    A row's facts fill the templates; one that it lacks is "nan". Columns without a number's format are to the left.
    """
    made, templates = Table(title=title, title_justify="left"), []
    for column in columns.split(" | "):
        header, brace, rest = column.partition("{")
        templates.append(brace + rest)
        made.add_column(header.strip(), justify="right" if ":" in rest else "left")
    for row in rows:
        made.add_row(*(template.format_map(_Facts(row)) for template in templates))
    return made


def show(given: argparse.Namespace, found: object, *tables: object, width: int | None = None) -> None:
    """Print what was found: as JSON if that was asked for, else the tables."""
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for one in tables:
        print(one) if isinstance(one, str) else Console(width=width).print(one)


def progress(items: Iterable[T], what: str) -> Iterable[T]:
    """Show a bar on stderr while items are taken."""
    return track(list(items), what, console=Console(stderr=True))


def one_thread() -> None:
    """Compute with one thread, and without gradients."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a directory that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="lora-bench-") as folder:
        yield Path(folder)


def make(work: Path, kind: str, adapters: Mapping[str, Mapping[str, Any]], **sizes: Any) -> torch.nn.Module:
    """Write a tiny model to work/base, and adapters (name: arguments of tiny.make_adapter) to work/adapters."""
    model = tiny.make_model(kind, **sizes)
    tiny.save_model(model, work / "base")
    for seed, (name, how) in enumerate(adapters.items()):
        tiny.make_adapter(model, work / "adapters" / name, **{"seed": seed, **how})
    return model


def make_alike(work: Path, kind: str, count: int, how: Mapping[str, Any], **sizes: Any) -> int:
    """Do what `make` does, with adapters a0, a1, ... of one shape; return the bytes of one of them."""
    make(work, kind, {f"a{seed}": how for seed in range(count)}, **sizes)
    return (work / "adapters" / "a0" / "adapter_model.safetensors").stat().st_size


def make_many(work: Path, count: int, **sizes: Any) -> None:
    """Do what `make` does, with adapters a00000, a00001, ... that are hard links to CONTENTS of them."""
    contents = {f"content-{seed}": {"lora_rank": 1, "targets": "qv"} for seed in range(min(CONTENTS, count))}
    make(work, "mixtral", contents, **sizes)
    (work / "adapters").rename(work / "contents")
    for number in range(count):
        target = work / "adapters" / f"a{number:05}"
        target.mkdir(parents=True)
        for file in (work / "contents" / f"content-{number % CONTENTS}").iterdir():
            (target / file.name).hardlink_to(file)


def slow_link(nbytes: int, seconds: float, room: int) -> list[str]:
    """Flags of a server that takes so long to load an adapter of these bytes, and has memory for `room` of them."""
    return ["--device-pool", str(round(nbytes * (room + 0.5))), "--host-link-gbps", f"{nbytes * 8e-9 / seconds:.6f}"]


@contextlib.contextmanager
def serving(work: Path, *more: str) -> Iterator[RunningServer]:
    """A ready server of what `make` wrote, with more flags of `serve`."""
    given = ["--base-model", str(work / "base"), "--adapters", str(work / "adapters"), *more]
    with running_server(work / "log", given) as server:
        yield server


def a_core_each(address: str) -> None:
    """Run this thread, and those that it starts, on the first core that it may use, and the server's shards on the
    last one; the controller and all else run on any. Without this, the scheduler now and then runs an engine and its
    shard on one core for a pass or two. With a single core it changes nothing."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    for shard in status(address).shards:
        run_on(shard.pid, cores[-1:])


def run_on(pid: int, cores: Collection[int]) -> None:
    """Pin a process's threads, and those that they start later, to these cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def status(address: str) -> pb.StatusReply:
    """Ask a server for its status; raises grpc.RpcError."""
    with open_channel(address) as channel:
        return rpc.ServerStub(channel).Status(pb.StatusRequest(), timeout=60)


def listed(address: str) -> Sequence[pb.Adapter]:
    """List a server's adapters; raises grpc.RpcError."""
    with open_channel(address) as channel:
        return all_pages(partial(rpc.AdaptersStub(channel).List, timeout=60)).adapters


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> float:
    """Poll, and return the seconds that it took; raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


def until_loaded(address: str, seconds: float = 60.0) -> None:
    """Wait until a server has loaded all its adapters; raises TimeoutError."""
    until(lambda: all(one.state == "ready" for one in listed(address)), "all adapters are loaded", seconds)


def least_s(rounds: int, call: Callable[[], object]) -> float:
    """Return the shortest of several calls: other load on the machine only ever adds to one."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


class Child:
    """`python -m MODULE ARGUMENTS`, which hears and says lines, and ends with this process."""

    def __init__(self, module: str, *arguments: object, **how: Any) -> None:
        """Start it; `how` is subprocess's."""
        command, pipe = [sys.executable, "-m", module, *map(str, arguments)], subprocess.PIPE
        self.process = children.start(command, stdin=pipe, stdout=pipe, text=True, **how)

    def tell(self, line: object = "") -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def said(self) -> str:
        """Wait for its next line; empty once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextlib.contextmanager
def crew(module: str, jobs: Iterable[Sequence[object]]) -> Iterator[list[Child]]:
    """Start a child with the arguments of each job, all at once; they end with the block."""
    with contextlib.ExitStack() as stack:
        started = []
        for job in jobs:
            started.append(Child(module, *job))
            stack.callback(children.stop, started[-1].process)
        yield started


def as_json(job: object) -> str:
    """Return the JSON of a msgspec.Struct, or of anything plain."""
    return msgspec.json.encode(job).decode()


def answers(crew: Iterable[Child], line: object = None) -> list[Any]:
    """Tell all children the same, as JSON, and return what each then says, of JSON."""
    crew = list(crew)
    for one in crew:
        one.tell(as_json(line))
    return [json.loads(one.said()) for one in crew]


def python(code: str) -> subprocess.Popen[bytes]:
    """Start a child that runs this code, and wait for its first line."""
    process = children.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process
