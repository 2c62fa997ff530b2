"""Measure the steps of vLLM by the tokens that they compute, for `lora-server profile-vllm`.

The result is what `provision simulate --engine-profile` reads (provisioning/model/engine_steps.py). Of each way to
serve, `base` (no adapters), `server` (vLLM without LoRA beside a LoRA server) and `coupled` (vLLM's own LoRA with so
many slots), it has medians in us:

    decode     a step of so many requests that decode, with so many adapters: a few, or as many as there can be
    prompt     the step of a lone prompt of so many tokens; its adapter is in a slot
    entry_us   what a request takes before its first step, and its token after that
    load_us    coupled: what a prompt's step takes longer where its adapter is in host memory, not in a slot;
               an engine with a slot for each adapter has none
    max_num_seqs, max_num_batched_tokens   vLLM's limits of a step, as they were in effect
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lora_server import spec
from lora_server.adapters import find_adapters
from lora_server.demo import children
from lora_server.demo.launch import EngineProcess, running_server
from lora_server.demo.profile import rounded, source
from lora_server.demo.profiled_vllm import CellTimes, EngineTimes, StepAsk, StepJob
from lora_server.errors import ConfigError

DECODE, FEW_ADAPTERS = (1, 2, 4, 8, 16, 32), (8, 32)
PROMPTS = (1, 16, 32, 64, 96, 120, 128, 256)  # 128 tokens of rank 64 on a width of 1,024: torch allocates them anew
SHORT_PROMPT, NEW_TOKENS, FEW, ROUNDS = 16, 20, 4, 2
_Cell = tuple[str, int, int]  # term, size, adapters
_LEAST_US = 1.0  # on a busy machine a lone prompt may seem to take less than nothing
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The measurement that is asked for. `slots` are those of vLLM's own LoRA, `engine_args` vLLM's arguments.

    An engine has `threads`, and one fewer beside a LoRA server, each on a core of its own where there
    are enough, and the model is not split; the server has the others.
    """

    base_model: Path
    adapters: Path
    threads: int
    slots: tuple[int, ...] = ()
    engine_args: Mapping[str, Any]
    serve_args: tuple[str, ...]


def measure(plan: EnginePlan, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure each way to serve; `say` hears what is under way. Raises LoraServerError where an engine fails."""
    names = list(find_adapters(plan.adapters))
    if not names:
        raise ConfigError(f"--adapters: {plan.adapters} has no adapters, expected one or more PEFT adapters")
    if plan.slots and min(plan.slots) >= len(names):
        raise ConfigError(f"--slots: expected fewer than the {len(names)} adapters, so that loads are measured")
    ranks = sorted(_rank(plan.adapters / name) for name in names)
    with children.ending_on_signals(), tempfile.TemporaryDirectory(prefix="lora-profile-") as scratch:
        ways = _Ways(plan, names, ranks[-1], Path(scratch))
        engines = []
        for kind, slots in (("base", 0), ("server", 0), *(("coupled", number) for number in plan.slots)):
            say(f"{kind}, {slots} slots" if slots else kind)
            engines.append(ways.measured(kind, slots))
    return {
        "source": source(),
        "command": command,
        "of": {
            "engine": f"vllm {importlib.metadata.version('vllm')}",
            "model": spec.load(plan.base_model).geometry,
            "lora_ranks": [ranks[0], ranks[-1]],
            "engine_args": dict(plan.engine_args),
        },
        "engines": engines,
    }


class _Ways:
    """The ways to serve these adapters, measured one after the other."""

    def __init__(self, plan: EnginePlan, names: list[str], max_rank: int, work: Path) -> None:
        self._plan, self._names, self._max_rank, self._work = plan, names, max_rank, work

    def measured(self, kind: str, slots: int) -> dict[str, Any]:
        """Measure one way; returns its part of the profile."""
        plan, names = self._plan, self._names
        threads = max(plan.threads - 1, 1) if kind == "server" else plan.threads
        settings = {"model": str(plan.base_model), "enable_prefix_caching": False, "skip_tokenizer_init": True}
        settings |= {"disable_log_stats": True, **plan.engine_args}
        paths = {} if kind == "base" else {name: str(plan.adapters / name) for name in names}
        engine, rest = children.cores(threads)
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        if len(engine) == threads and not any("parallel" in name for name in plan.engine_args):
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, engine))
        with contextlib.ExitStack() as stack:
            if kind == "coupled":
                settings |= {"enable_lora": True, "max_loras": slots, "max_lora_rank": self._max_rank}
                settings["max_cpu_loras"] = max(len(names), slots)
            else:
                settings = {name: value for name, value in settings.items() if not name.startswith("lora_")}
            if kind == "server":
                flags = ["--base-model", str(plan.base_model), "--adapters", str(plan.adapters), *plan.serve_args]
                with children.on_cores(rest):
                    server = stack.enter_context(running_server(self._work / "server.log", flags))
                environment["LORA_SERVER_ADDRESS"], paths = server.address, dict.fromkeys(names, "by-name")
            first, asked = cells(names if paths else [None], slots)
            found = self._run(StepJob(settings, paths, first, list(asked.values()), ROUNDS), environment)
        limits = {"max_num_seqs": found.max_num_seqs, "max_num_batched_tokens": found.max_num_batched_tokens}
        times = dict(zip(asked, found.cells, strict=True))
        return {"lora": kind, "slots": slots, "threads": threads, **limits, **terms(times)}

    def _run(self, job: StepJob, environment: Mapping[str, str]) -> EngineTimes:
        """Run an engine to its end; raises LoraServerError with the end of its log, or at the deadline."""
        what, log = "profile-vllm: vLLM", self._work / "engine.log"
        with EngineProcess(what, "lora_server.demo.profiled_vllm", log, environment) as engine:
            engine.write(msgspec.json.encode(job))
            return msgspec.json.decode(engine.line(), type=EngineTimes)


def cells(names: Sequence[str | None], slots: int) -> tuple[list[list[StepAsk]], dict[_Cell, list[list[StepAsk]]]]:
    """List the requests that have each adapter loaded, and the cells. Coupled, cells use those that the slots hold."""
    held = names[:slots] if slots else names
    hold = [[StepAsk(3, name, 2)] for name in held]
    found: dict[_Cell, list[list[StepAsk]]] = {}
    if cold := names[len(held) : 2 * len(held)][: 2 * FEW]:
        found["load", 0, 1] = [[StepAsk(SHORT_PROMPT, name)] for name in cold]
        found["held", 0, 1] = hold
    for batch in DECODE:
        most = min(batch, len(held))
        for number in sorted({min(FEW, most), most} if batch in FEW_ADAPTERS else {most}):
            turns = held if number == most else held[:FEW]
            asks = [StepAsk(SHORT_PROMPT, turns[place % len(turns)], NEW_TOKENS) for place in range(max(batch, FEW))]
            found["decode", batch, number] = [asks[at : at + batch] for at in range(0, len(asks), batch)]
    for tokens in PROMPTS:
        found["prompt", tokens, 1] = [[StepAsk(tokens, held[place % len(held)])] for place in range(FEW)]
    return [[StepAsk(3, name, 2)] for name in names] + hold, found


def terms(times: Mapping[_Cell, CellTimes]) -> dict[str, Any]:
    """Return a way's part of the profile, of the times of its cells."""
    entry_us = max(times["prompt", 1, 1].first_us - times["decode", 1, 1].step_us, 0.0)
    found: dict[str, Any] = {"entry_us": rounded(entry_us), "decode": [], "prompt": []}
    if ("load", 0, 1) in times:
        cold, held = times["load", 0, 1].first_us, times["prompt", SHORT_PROMPT, 1].first_us
        found["load_us"] = rounded(max(cold - held, 0.0))
    for (term, size, adapters), one in times.items():
        if term == "decode":
            found[term].append({"batch": size, "adapters": adapters, "us": rounded(max(one.step_us, _LEAST_US))})
        elif term == "prompt":
            found[term].append({"tokens": size, "us": rounded(max(one.first_us - entry_us, _LEAST_US))})
    return found


def _rank(folder: Path) -> int:
    try:
        return int(json.loads((folder / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--adapters: {folder / 'adapter_config.json'}: {error!r}, expected a PEFT adapter") from None
