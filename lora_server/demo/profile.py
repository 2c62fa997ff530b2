"""What `lora-server profile` measures: a real server, and real engines that decode and compute prompts on it.

The result is what `provision --profile` reads (provisioning/model/profile.py). Times are medians, in us of one layer
with gate_up and down together, for one engine's batch:

    receive, compute, send   by shards a stage, batch, and engines that step at once; the slowest shard's
    exposed                  what a layer takes beyond attention and the longer of FFN and LoRA step
    prompt_*                 the same of one prompt of so many tokens, with one adapter
    base_*, prompt_*         the engine's experts (ffn), and all else of a layer (attention), without adapters

`machine` has what a part of it that runs one process brings: a core, here.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from lora_server import host_memory, spec
from lora_server.demo import children, tiny
from lora_server.demo.engine import Sequence as Asked
from lora_server.demo.engine import Times, load_model
from lora_server.demo.launch import EngineProcess, running_server
from lora_server.demo.profiled_engine import Cell, ProfileJob, ProfileTimes
from lora_server.demo.run import without_known_warnings
from lora_server.errors import ConfigError, LoraServerError

ENGINE, DEFAULT_MODEL = "lora_server.demo.profiled_engine", "small-mixtral"
NUM_ADAPTERS, NEW_TOKENS, PROMPT_TOKENS, REPEATS = 16, 24, 8, 12
LOADED_AT_ONCE = 3.5  # adapters that fit while loading is measured
_MATRIX, _COPIED, _ROUNDS = 1024, 64 << 20, 5
_LEAST_US = 0.1  # of a term; one that was hidden counts so
TERMS = ("receive", "compute", "send", "exposed")
Rows = dict[str, list[dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    """What is measured: decode batches and prompts, by number of shards and of engines, from one to `engines`."""

    base_model: Path | None
    lora_rank: int = 16
    eps: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (4, 8, 16, 32)
    prompts: tuple[int, ...] = (32, 128, 256)
    engines: int = 2
    transport: str = "shm"
    wire: str = "exact"


def measure(plan: ProfilePlan, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; `say` hears what is under way. Raises LoraServerError where a server or an engine fails."""
    with (
        children.ending_on_signals(),
        tempfile.TemporaryDirectory(prefix="lora-profile-") as scratch,
        without_known_warnings(),
    ):
        made = _Measured(plan, Path(scratch))
        rows = Rows()
        for ep in plan.eps:
            with made.serving(ep) as address:
                for number in range(1, plan.engines + 1):
                    say(f"{number} engines on ep{ep}-pp1")
                    made.cells(rows, address, ep, number)
        say("loading adapters")
        load_us = made.load_us()
    model = made.model
    return {
        "source": source(),
        "command": command,
        "of": {
            "model": model.geometry,
            "gpu": "cpu",
            "lora_rank": plan.lora_rank,
            "wire": plan.wire,
            "transport": plan.transport,
        },
        "machine": {
            "memory_gib": rounded(host_memory.available_bytes() / (os.cpu_count() or 1) / 2**30),
            "memory_gb_per_s": rounded(_copied_gb_per_s()),
            "tflops": rounded(_tflops()),
            "load_gb_per_s": rounded(model.adapter_bytes(plan.lora_rank) / load_us / 1e3),
        },
        "terms": rows,
    }


class _Measured:
    """The model and its adapters in a scratch directory, and the runs with them."""

    def __init__(self, plan: ProfilePlan, work: Path) -> None:
        self.plan, self._work = plan, work
        self._base_decode, self._base_prompts = list[Times](), list[Times]()
        self._base = plan.base_model or work / "base"
        base: Any
        if plan.base_model is None:
            base = tiny.make_model("mixtral", **_sizes(spec.PRESETS[DEFAULT_MODEL]))
            tiny.save_model(base, self._base)
        else:
            base = load_model(self._base)
        self.model = spec.load(self._base)
        if not self.model.moe_layers:
            raise ConfigError(f"--base-model: {self._base} has no experts; a profile is of a mixture-of-experts model")
        self._names = [f"tenant-{index:02d}" for index in range(NUM_ADAPTERS)]
        for index, name in enumerate(self._names):
            tiny.make_adapter(base, work / "adapters" / name, lora_rank=plan.lora_rank, seed=index)

    @contextlib.contextmanager
    def serving(self, ep: int, *more: str) -> Iterator[str]:
        """Run a server of `ep` shards; gives its address."""
        rows = max(*self.plan.batches, *self.plan.prompts) * self.model.top_k
        flags = ["--base-model", str(self._base), "--adapters", str(self._work / "adapters"), "--layout", f"ep{ep}-pp1"]
        flags += ["--require-all-adapters"]
        flags += ["--max-step-rows", str(max(rows, 256)), "--wire", self.plan.wire, *more]
        with running_server(self._work / "server.log", flags) as server:
            yield server.address

    def cells(self, rows: Rows, address: str, ep: int, number: int) -> None:
        """Measure `number` engines at once; alone, also prompts, and the first time the base model."""
        plan = self.plan
        decoding = [self._decoding(batch, self._names) for batch in plan.batches]
        prompts = [self._prompt(tokens, self._names[0]) for tokens in plan.prompts] if number == 1 else []
        base = not self._base_decode
        if base:
            decoding += [self._decoding(batch, [None]) for batch in plan.batches]
            prompts += [self._prompt(tokens, None) for tokens in plan.prompts]
        together = self._run(address, [*decoding, *prompts], number)
        found = [_mean(times) for times in zip(*(one.cells for one in together), strict=True)]
        own, prompted = found[: len(decoding)], found[len(decoding) :]
        if base:
            self._base_decode, self._base_prompts = own[len(plan.batches) :], prompted[len(plan.prompts) :]
            for prefix, sizes, of in (
                ("base_", plan.batches, self._base_decode),
                ("prompt_", plan.prompts, self._base_prompts),
            ):
                for size, times in zip(sizes, of, strict=True):
                    rows.setdefault(f"{prefix}ffn", []).append({"batch": size, "us": rounded(times.moe)})
                    attention = {"batch": size, "us": rounded(times.layer - times.moe)}
                    rows.setdefault(f"{prefix}attention", []).append(attention)
        for batch, times, alone in zip(plan.batches, own, self._base_decode, strict=False):
            _add(rows, "", times, alone, ep=ep, batch=batch, engines=number)
        for tokens, times, alone in zip(plan.prompts, prompted, self._base_prompts, strict=False):
            _add(rows, "prompt_", times, alone, ep=ep, batch=tokens)

    def load_us(self) -> float:
        """Measure how long an adapter takes from the host's memory into a pool that holds a few."""
        pool = round(LOADED_AT_ONCE * 2 * self.model.adapter_bytes(self.plan.lora_rank))  # float32
        with self.serving(1, "--device-pool", str(pool)) as address:
            found = self._run(address, [], 1, self._names)[0].load_us
        if found <= 0:
            raise LoraServerError("profile: an adapter's load was not to be told from none; measure on a quiet machine")
        return found

    def _run(self, address: str, cells: list[Cell], number: int, loads: Sequence[str] = ()) -> list[ProfileTimes]:
        job = ProfileJob(str(self._base), address, self.plan.transport, cells, list(loads))
        with contextlib.ExitStack() as stack:
            logs = [self._work / f"engine{place}.log" for place in range(number)]
            engines = [stack.enter_context(EngineProcess("profile: an engine", ENGINE, log)) for log in logs]
            for engine in engines:
                engine.write(msgspec.json.encode(job))
            for _ in cells:
                for engine in engines:
                    engine.line()
                for engine in engines:
                    engine.write(b"go")
            return [msgspec.json.decode(engine.line(), type=ProfileTimes) for engine in engines]

    def _decoding(self, batch: int, names: Sequence[str | None]) -> Cell:
        rng = np.random.default_rng(batch)
        prompts = rng.integers(3, 250, (batch, PROMPT_TOKENS)).tolist()
        return Cell([Asked(ids, names[at % len(names)]) for at, ids in enumerate(prompts)], NEW_TOKENS)

    def _prompt(self, tokens: int, name: str | None) -> Cell:
        return Cell([Asked(np.random.default_rng(tokens).integers(3, 250, tokens).tolist(), name)], 1, REPEATS)


def _sizes(model: spec.ModelSpec) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }


def _mean(together: Sequence[Times]) -> Times:
    return Times(*(statistics.fmean(values) for values in zip(*map(msgspec.structs.astuple, together), strict=True)))


def _add(rows: Rows, prefix: str, times: Times, alone: Times, **at: float) -> None:
    """Add the terms of a cell; `alone` are the same engine's without adapters."""
    longer_us = max(alone.moe, times.recv + times.lora + times.send)
    exposed_us = times.layer - (alone.layer - alone.moe) - longer_us
    for term, us in zip(TERMS, (times.recv, times.lora, times.send, exposed_us), strict=True):
        rows.setdefault(prefix + term, []).append({**at, "us": rounded(max(us, _LEAST_US))})


def _tflops() -> float:
    """Measure the rate of this thread's GEMM of float32."""
    torch.set_num_threads(1)
    one = torch.rand(_MATRIX, _MATRIX)
    return 2 * _MATRIX**3 / _least_s(lambda: one @ one) / 1e12


def _copied_gb_per_s() -> float:
    """Measure the rate at which this thread reads memory, by a sum."""
    one = torch.ones(_COPIED // 4)
    return _COPIED / _least_s(one.sum) / 1e9


def _least_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def source() -> str:
    """Return this machine and the day, as profiles name where they were measured."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"


def rounded(value: float) -> float:
    """Return a number with the four digits that a profile has."""
    return float(f"{value:.4g}")
