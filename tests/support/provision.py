"""The command and questions to it; and traces made with a seed, for what a plan must hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from provisioning.cli import app
from provisioning.plan.flags import PlanFlags
from provisioning.plan.scenario import scenario
from provisioning.workload.requests import Requests
from provisioning.workload.workload import zipf

SLO = "ttft_p95=250ms,tpot_avg=100ms"
QWEN = {"model": "qwen3-30b-a3b", "lora_rank": 32, "gpu": "hopper-96"}
DECODING = {"prefill": "apart"}  # prompts are other instances'
LOAD = {"instances": 4, "batch_size": 64.0}


def question(**flags):
    """Make a question to the planner: 512 adapters of Mixtral under four instances, unless the flags say otherwise."""
    return scenario(PlanFlags(**({"slo": SLO, "model": "mixtral-8x7b", "adapters": 512} | LOAD | flags)))


def typed(**flags):
    """PlanFlags of `question` as a command line has them."""
    return [piece for name, value in flags.items() for piece in (f"--{name.replace('_', '-')}", str(value))]


ASKED = typed(slo=SLO, model="mixtral-8x7b", adapters=512, **LOAD)


def provision(*arguments):
    """Run the command in this process."""
    return CliRunner().invoke(app, [str(one) for one in arguments])


def as_json(*arguments):
    """Run the command with --json, which succeeds; return what it prints."""
    found = provision(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def check_refused(found, says):
    """Exit status 2 and one line on stderr."""
    assert found.exit_code == 2 and found.stdout == "", found.output
    assert says in found.stderr and found.stderr.count("\n") == 1, found.stderr


# -- traces: steady, diurnal, in bursts, longer in the tail, drifting

KINDS = ("steady", "diurnal", "bursts", "long-tail", "drift")
ADAPTERS = 300


def calls(kind: str, seed: int, num: int = 15_000, span_s: float = 3600.0):
    """(arrivals in s, adapters, output tokens) of one kind, in order of arrival."""
    rng = np.random.default_rng(seed)
    popularity = zipf(1.0, ADAPTERS)
    arrival_s = np.sort(rng.uniform(0, span_s, num))
    if kind == "diurnal":  # +-60 % of the mean, by inverting the integral of the rate
        grid = np.linspace(0, 1, 4001)
        integral = grid + 0.6 * (1 - np.cos(2 * np.pi * grid)) / (2 * np.pi)
        arrival_s = np.interp(np.sort(rng.uniform(size=num)), integral, grid) * span_s
    if kind == "bursts":
        gaps = rng.gamma(1 / 16, 16, num)
        arrival_s = np.cumsum(gaps) * span_s / gaps.sum()
    adapter = rng.choice(ADAPTERS, num, p=popularity)
    if kind == "drift":  # the popular adapters change with the hour
        adapter = (adapter + (arrival_s / span_s * 5).astype(int) * 40) % ADAPTERS
    tokens = np.maximum(np.rint(rng.lognormal(np.log(180) - 0.35, 0.84, num)), 1)
    if kind == "long-tail":
        tokens = np.where(adapter >= 30, 4 * tokens, tokens)
    return arrival_s, adapter, tokens.astype(int)


def requests(arrival_s, tokens, adapter=None, num_adapters=ADAPTERS, names=()):
    """Make requests of these arrivals and output tokens; without `adapter` all are of the first one."""
    arrival_s = np.asarray(arrival_s, dtype=float)
    adapter = np.zeros(arrival_s.size, dtype=np.int64) if adapter is None else np.asarray(adapter)
    fields = {"num_adapters": num_adapters, "names": names}
    return Requests(arrival_s=arrival_s, adapter=adapter, output_tokens=np.asarray(tokens), **fields)


def write(path: Path, kind: str, seed: int, **size) -> Path:
    """Write the calls as a file for --trace; return its path."""
    rows = zip(*calls(kind, seed, **size), strict=True)
    lines = (f"{at:.4f},adapter-{adapter},100,{tokens}\n" for at, adapter, tokens in rows)
    path.write_text("timestamp,adapter,input_tokens,output_tokens\n" + "".join(lines))
    return path


def write_counts(path: Path, kind: str, seed: int, **size) -> Path:
    """Write the calls as a file for --counts, with mean output tokens; return its path."""
    _, adapter, tokens = calls(kind, seed, **size)
    seen = np.unique(adapter)
    lines = (f"adapter-{i},{(adapter == i).sum()},{tokens[adapter == i].mean():.3f}\n" for i in seen)
    path.write_text("adapter,count,mean_output_tokens\n" + "".join(lines))
    return path
