"""Measure the terms of the latency model on this machine, as a profile that `provision --profile` takes.

    python -m bench.profile --out profile.json
    python -m bench.profile --gpu-run bench/out/gpu_run/H200 --out profile.json

The second reads what `make gpu` found: compute, by its stage `headline`, of the kernels alone. In the first a real
server and a real engine process decode; receive, compute and send are those of the slowest
shard, in us of one layer with gate_up and down together, and base_ffn is the engine's own expert GEMMs.
The figures are of this machine's CPUs and of a small model: they show the planner with measured
terms, and are no substitute for measuring the hardware that a plan is for.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.gpu_run import planner, record
from lora_server.demo import tiny
from lora_server.demo.engine import Job, Sequence, Times
from lora_server.demo.launch import finish_engine, running_server, start_engine
from lora_server.errors import ConfigError

EPS, BATCHES, NUM_ADAPTERS, LORA_RANK, NEW_TOKENS = (1, 2, 4), (8, 16, 32), 16, 16, 12
GEOMETRY = {"hidden_size": 256, "intermediate_size": 512}


def decode_times(work: Path, ep: int, batch: int) -> Times:
    rng = np.random.default_rng(0)
    names = [f"tenant-{index % NUM_ADAPTERS:02d}" for index in range(batch)]
    sequences = [Sequence(rng.integers(3, 250, 8).tolist(), name) for name in names]
    flags = ["--base-model", str(work / "base"), "--adapters", str(work / "adapters"), "--layout", f"ep{ep}-pp1"]
    with running_server(work / "log", flags) as server:
        job = Job(str(work / "base"), server.address, [sequences], NEW_TOKENS)
        return finish_engine(start_engine(job)).times_us


def measure() -> dict[str, Any]:
    terms: dict[str, list[dict[str, Any]]] = {"receive": [], "compute": [], "send": [], "base_ffn": []}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model = tiny.make_model("mixtral", **GEOMETRY)
        tiny.save_model(model, work / "base")
        for index in range(NUM_ADAPTERS):
            path = work / "adapters" / f"tenant-{index:02d}"
            tiny.make_adapter(model, path, lora_rank=LORA_RANK, seed=index, targets="experts")
        cells = [(ep, batch) for ep in EPS for batch in BATCHES]
        for ep, batch in track(cells, "decoding", console=Console(stderr=True)):
            times = decode_times(work, ep, batch)
            for term, us in (("receive", times.recv), ("compute", times.lora), ("send", times.send)):
                terms[term].append({"ep": ep, "batch": batch, "us": round(us, 1)})
            if ep == EPS[0]:
                terms["base_ffn"].append({"batch": batch, "us": round(times.moe, 1)})
    of = {"model": "tiny-mixtral", "gpu": "cpu", "lora_rank": LORA_RANK, "wire": "exact", "transport": "shm"}
    return {"source": f"{platform.machine()}_cpu_{time.strftime('%Y-%m-%d')}", "of": of, "terms": terms}


def of_gpu_run(folder: Path, transport: str) -> dict[str, Any]:
    """The compute terms that `make gpu` measured. Raises ConfigError where the stage did not come to them."""
    try:
        return planner.profile(record.read(folder / "headline.jsonl"), transport)
    except ConfigError as error:
        raise ConfigError(f"--gpu-run: {folder}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu-run", type=Path, help="a GPU's folder of bench/out/gpu_run")
    parser.add_argument("--transport", default="gpu", help="the transport of the run's kernels (default: gpu)")
    arguments = parser.parse_args()
    found = measure() if arguments.gpu_run is None else of_gpu_run(arguments.gpu_run, arguments.transport)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
