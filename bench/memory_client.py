"""A client that steps with one adapter at a time and checks what it gets, for the benches of a shard's memory.

python -m bench.memory_client JOB        one client process; JOB is JSON, see Job
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from client_connector.client import Client
from client_connector.packing import Activations, HostPacker
from client_connector.remote import RemoteServer
from client_connector.routing import Batch, Message, Run, route_dense, route_experts
from lora_server.adapters import open_adapter
from lora_server.errors import LoraServerError
from lora_server.spec import ModelSpec, Site
from lora_server.wire.terms import Held
from provisioning.workload.workload import zipf

TOLERANCE = 1e-4  # of the largest value of a step, in float32


class Oracle:
    """An adapter's matrices in float64, straight from its files."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._blocks: dict[tuple[Site, int], list[tuple[float, int, torch.Tensor, torch.Tensor]]] = {}
        self._spec = spec
        with open_adapter(path, spec) as adapter:
            for site in adapter.sites():
                for expert in adapter.experts(site):
                    self._blocks[site, expert] = [
                        (part.scale, part.out_begin, a.double(), b.double())
                        for part, a, b in adapter.read(site, expert)
                    ]

    def delta(self, site: Site, expert: int, x_TK: torch.Tensor) -> torch.Tensor:
        out_TO = torch.zeros(len(x_TK), self._spec.out_width(site), dtype=torch.float64)
        for scale, begin, a, b in self._blocks.get((site, expert), ()):
            out_TO[:, begin : begin + len(b)] += scale * (x_TK.double() @ a.T) @ b.T
        return out_TO


@dataclass
class Drawn:
    site: Site
    batch: Batch
    x: torch.Tensor
    experts_Tk: torch.Tensor
    is_routed: bool

    @property
    def by_pair(self) -> bool:
        return self.is_routed and self.site.projection == "down"


class Caller:
    """One joined client. A step is `rows` random rows of one adapter at one site, as an engine would send them."""

    def __init__(self, address: str, rows: int, seed: int, timeout: float = 60.0) -> None:
        self.client = Client(RemoteServer(address, "shm"), timeout_seconds=timeout)
        self.spec, self._rows = self.client.terms.spec, rows
        self._random = torch.Generator().manual_seed(seed)

    def hold(self, name: str) -> Held:
        """An adapter, after joining anew where the session is broken."""
        self.client.recover()
        (held,) = self.client.acquire([name])
        return held

    def draw(self, held: Held, site: Site, *, decode: bool = True) -> Drawn:
        """Random rows of one adapter, and at an expert's site its experts."""
        x = torch.randn(self._rows, self.spec.in_width(site), generator=self._random)
        experts_Tk = torch.zeros(self._rows, 1, dtype=torch.int64)
        is_routed = site.projection in ("gate_up", "down") and self.spec.experts_at(site) > 1
        if is_routed:
            experts_Tk = torch.rand(self._rows, self.spec.experts, generator=self._random).topk(self.spec.top_k).indices
            x = x.repeat_interleave(self.spec.top_k, 0) if site.projection == "down" else x
        batch = Batch.of([Run.of(held, 0, self._rows)], decode)
        assert batch is not None
        return Drawn(site, batch, x, experts_Tk, is_routed)

    def exchange(self, drawn: Drawn, then: Callable[[Message, torch.Tensor], None] = lambda *_: None) -> None:
        placement, rows, site = self.client.placement, self.client.terms.max_step_rows, drawn.site
        if drawn.is_routed:
            owners_E = torch.tensor(placement.first_owners(site))
            messages = route_experts(drawn.batch, drawn.experts_Tk, owners_E, rows)
        else:
            messages = route_dense(drawn.batch, placement.owners(site)[0], rows)
        given = Activations(x=drawn.x, decode=drawn.batch.decode, by_pair=drawn.by_pair)
        self.client.start(HostPacker(self.client.terms, site, given), messages).finish(then)

    def step(self, held: Held, site: Site, oracle: Oracle | None = None) -> float:
        """One exchange; with an oracle the largest error, as a share of the largest value."""
        drawn, worst = self.draw(held, site), [0.0, 1e-30]
        experts_Tk, x = drawn.experts_Tk, drawn.x

        def check(message: Message, delta_NO: torch.Tensor) -> None:
            assert oracle is not None
            top_k, entries = experts_Tk.shape[1], message.pairs_P
            for expert in experts_Tk.reshape(-1)[entries].unique().tolist():
                mine = experts_Tk.reshape(-1)[entries] == expert
                right = oracle.delta(site, expert, x[entries[mine] if drawn.by_pair else entries[mine] // top_k])
                worst[0] = max(worst[0], float((delta_NO[mine] - right).abs().max()))
                worst[1] = max(worst[1], float(right.abs().max()))

        self.exchange(drawn, check if oracle is not None else lambda *_: None)
        return worst[0] / worst[1]


@dataclass
class Job:
    """`names` by falling popularity; names that end alike (`-7`) have one content, in `sources` by that end."""

    server: str
    names: list[str]
    sources: dict[str, str]
    steps: int
    seed: int
    zipf: float = 1.2
    steps_per_request: int = 8
    rows: int = 2
    timeout: float = 30.0


@dataclass
class Seen:
    """The results of one job's steps up to now; times in seconds of time.time()."""

    steps: int = 0
    wrong: int = 0
    worst: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0
    last_right: float = 0.0
    done: bool = False


def work(job: Job, tell: Callable[[Seen], None], enough: threading.Event) -> None:
    """Make requests of random adapters, each of some steps at random sites of rising layers; go on after errors.

    Ends when the job's steps are done and `enough` is set.
    """
    caller, dice = Caller(job.server, job.rows, job.seed, job.timeout), random.Random(job.seed)
    popular = iter(_drawn(job))
    oracles = {end: Oracle(Path(path), caller.spec) for end, path in job.sources.items()}
    seen = Seen()
    while seen.steps < job.steps or not enough.is_set():
        name = job.names[next(popular)]
        began = time.time()
        try:
            held = caller.hold(name)
            sites = sorted(dice.choices(sorted(held.sites), k=job.steps_per_request))
            for site in sites:
                began = time.time()
                error = caller.step(held, site, oracles[name.rpartition("-")[2]])
                seen.steps += 1
                seen.wrong += not error <= TOLERANCE
                seen.worst = max(seen.worst, error)
                seen.last_right = time.time()
                seen.slowest = max(seen.slowest, time.time() - began)
            caller.client.release([held])
        except LoraServerError as error:
            seen.errors[error.code] = seen.errors.get(error.code, 0) + 1
            print(json.dumps({"error": str(error)}), file=sys.stderr)
        tell(seen)
    caller.client.close()
    seen.done = True
    tell(seen)


def _drawn(job: Job) -> Iterator[int]:
    source = np.random.default_rng(job.seed)
    while True:
        yield from source.choice(len(job.names), 1024, p=zipf(job.zipf, len(job.names))).tolist()


def main() -> None:
    """Works on the job until standard input ends, with a line of JSON after each request."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    enough = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), enough.set()), daemon=True).start()
    job = msgspec.json.decode(sys.argv[1], type=Job)
    work(job, lambda seen: print(msgspec.json.encode(seen).decode(), flush=True), enough)


if __name__ == "__main__":
    main()
