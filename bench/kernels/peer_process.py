"""The peers at one site, in a process of their own: what kills it leaves the run alone.

    python -m bench.kernels.peer_process MODEL SITE --tokens 64,256 --peers vllm,sglang --peers-dir DIR

One JSON object per line on stdout: {peer, tokens, option, us, ...}, or {peer, error}; `begin` before each peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 400
MOST_ERROR = 2e-2  # of a peer's sampled rows: they keep v in bf16
SAMPLES = 12


def measured(peer: Any, weights: Any, tokens: int, device: Any) -> dict[str, Any]:
    """The fastest option on one draw, then that one on all draws; every option that failed is named."""
    import torch

    from bench.kernels import peers
    from bench.kernels.draws import draws
    from bench.kernels.measure import SEED, rows_of
    from bench.kernels.timing import Flush, capture, replay_us

    model, site, flush = weights.model, weights.site, Flush(device)
    generator = torch.Generator(device).manual_seed(SEED)
    rows = rows_of(model, site, tokens, generator)
    steps = [peers.PeerStep.make(site, draw, rows) for draw in draws(model, tokens)]
    swept: list[dict[str, Any]] = []
    for option in peer.options(site, tokens):
        try:
            prepared = peer.prepare(weights, steps[0], option)
            steps[0].out.fill_(float("nan"))
            graph = capture(prepared.run, device)
            graph.replay()
            error = peers.sampled_error(weights, steps[0], prepared.weighted, SAMPLES, SEED)
            if not error < MOST_ERROR:
                raise ValueError(f"relative error {error:.3g}, expected below {MOST_ERROR}")
            swept.append({"option": option, "us": replay_us([graph], flush, device)[0]})
        except Exception as problem:
            swept.append({"option": option, "error": f"{type(problem).__name__}: {str(problem)[:300]}"})
    right = [entry for entry in swept if "us" in entry]
    if not right:
        return {"swept": swept, "error": "no option ran and was right"}
    option = min(right, key=lambda entry: entry["us"])["option"]
    ready = [peer.prepare(weights, step, option) for step in steps]
    times = replay_us([capture(prepared.run, device) for prepared in ready], flush, device)
    errors = [
        peers.sampled_error(weights, step, prepared.weighted, SAMPLES, SEED)
        for step, prepared in zip(steps, ready, strict=True)
    ]
    result = {"option": option, "us": statistics.mean(times), "max_rel_err": max(errors), "swept": swept}
    routed = [prepared.with_routing for prepared in ready if prepared.with_routing is not None]
    if len(routed) == len(ready):
        result["with_routing_us"] = statistics.mean(replay_us([capture(run, device) for run in routed], flush, device))
    return result


def _end_with(parent: int) -> None:
    """Exit once the parent is gone, so that a hanging kernel ends with the bench. Needs no module but bench.kernels."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def run(arguments: argparse.Namespace) -> None:
    """Measure all peers, one after the other; print each line as soon as it is known."""
    import torch

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    from bench.kernels import peers
    from bench.kernels.measure import SEED
    from bench.kernels.models import MODELS

    device, model = torch.device("cuda", 0), MODELS[arguments.model]
    (site,) = (site for site in model.sites if site.name == arguments.site)
    weights = None
    for name in arguments.peers.split(","):
        print(json.dumps({"peer": name, "begin": True}), flush=True)
        try:
            peer = peers.load(name, arguments.peers_dir)
            if weights is None:
                weights = peers.PeerWeights.random(model, site, torch.Generator(device).manual_seed(SEED))
            for tokens in map(int, arguments.tokens.split(",")):
                found = measured(peer, weights, tokens, device)
                print(json.dumps({"peer": name, "tokens": tokens, "about": peer.about, **found}), flush=True)
                torch.cuda.empty_cache()
        except Exception as problem:
            print(json.dumps({"peer": name, "error": f"{type(problem).__name__}: {problem}"}), flush=True)


def collect(
    model: str, site: str, tokens: list[int], names: list[str], directory: Path, seconds: float = DEADLINE_SECONDS
) -> list[dict[str, Any]]:
    """The lines of all peers; one that took its process down, or all too long, is an error line, and the rest go on.

    A process has `seconds`; after one that did not end well another begins with the peers that are left.
    """
    lines: list[dict[str, Any]] = []
    left = list(names)
    while left:
        command = [sys.executable, "-m", "bench.kernels.peer_process", model, site, "--peers-dir", str(directory)]
        command += ["--tokens", ",".join(map(str, tokens)), "--peers", ",".join(left)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            output, reason = done.stdout, f"its process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            ended_well = done.returncode == 0
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
            reason, ended_well = f"its process took more than {seconds:g} s", False
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        lines += [line for line in found if "begin" not in line]
        if ended_well:
            break
        begun = [line["peer"] for line in found if "begin" in line] or left[:1]
        lines.append({"peer": begun[-1], "error": reason})
        left = left[left.index(begun[-1]) + 1 :]
    return lines


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("site")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--peers-dir", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse())
