"""python -m bench.kernels [--roofline | --balance | --correctness | --merge FILES] [--models ...] [--tokens ...] ...

--roofline and --balance need no GPU: they count and model. The rest runs on the first GPU. --out FILE writes JSON
there and FILE's .md beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from bench.kernels import balance, report, roofline
from bench.kernels.models import MODELS, Model
from bench.kernels.peer_process import DEADLINE_SECONDS

PEERS = ("vllm", "sglang", "punica")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="64,256,1024")
    parser.add_argument("--peers", default=",".join(PEERS), help="'' for none")
    parser.add_argument("--peers-dir", type=Path, default=Path("bench/out/peers"))
    parser.add_argument("--peer-seconds", type=float, default=DEADLINE_SECONDS, help="for a process of the peers")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--roofline", action="store_true")
    parser.add_argument("--balance", action="store_true", help="a model of how evenly warps share a step")
    parser.add_argument("--gbps", type=float, default=roofline.GBPS, help="of --roofline and --balance")
    parser.add_argument("--correctness", action="store_true")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of runs over different models, into one")
    return parser.parse_args(arguments)


def models_of(names: str) -> list[Model]:
    """Raises SystemExit for a name that is none."""
    unknown = [name for name in names.split(",") if name not in MODELS]
    if unknown:
        sys.exit(f"--models: got {', '.join(unknown)}, expected some of {', '.join(MODELS)}")
    return [MODELS[name] for name in names.split(",")]


def tokens_of(counts: str) -> list[int]:
    """Raises SystemExit for what is no batch size."""
    wrong = [count for count in counts.split(",") if not count.isdigit() or int(count) == 0]
    if wrong:
        sys.exit(f"--tokens: got {', '.join(map(repr, wrong))}, expected numbers above 0 such as 64,256")
    return [int(count) for count in counts.split(",")]


def peers_of(names: str) -> list[str]:
    """Raises SystemExit for a name that is none."""
    given = [name for name in names.split(",") if name]
    unknown = [name for name in given if name not in PEERS]
    if unknown:
        sys.exit(f"--peers: got {', '.join(unknown)}, expected some of {', '.join(PEERS)}")
    return given


def need_gpu() -> None:
    """Raises SystemExit where there is nothing to measure on."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU here; only --roofline, --balance and --merge run without one")
    try:
        import cupy  # noqa: F401
    except ImportError:
        sys.exit("CuPy is missing: pip install '.[cuda]'")


def hardware() -> dict[str, Any]:
    """The GPU and what drives it; nothing that names the host."""
    import cupy
    import torch

    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "multiprocessors": about.multi_processor_count,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": cupy.__version__,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every cell; ours first at each site, then the peers, one site's weights in memory at a time."""
    import torch

    from bench.kernels import measure as ours_measure
    from bench.kernels import ours, peer_process

    models, tokens, names = models_of(arguments.models), tokens_of(arguments.tokens), peers_of(arguments.peers)
    need_gpu()
    gpu = ours_measure.Gpu(torch.device("cuda", 0))
    print(f"lora_step compiled in {gpu.compile_s:.1f} s", file=sys.stderr)
    sites: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    for model in models:
        for site in model.sites:
            adapters = ours.Adapters(model, site, torch.Generator(gpu.device).manual_seed(ours_measure.SEED))
            for count in tokens:
                sites.append(ours_measure.site_result(model, site, count, adapters, gpu))
                print(f"{model.name} {site.name} {count}: {sites[-1]['us']:.1f} us", file=sys.stderr)
            del adapters
            torch.cuda.empty_cache()
            lines = peer_process.collect(
                model.name, site.name, tokens, names, arguments.peers_dir, arguments.peer_seconds
            )
            peers += [{"model": model.name, "site": site.name, **line} for line in lines]
    return {
        "cells": report.cells(sites, peers),
        **ours_measure.overhead_us(gpu),
        "command": "python -m bench.kernels " + shlex.join(sys.argv[1:]),
        "hardware": hardware(),
        "read_gbps": gpu.read_gbps,
        "sites": sites,
        "peers": peers,
    }


def merged(files: list[Path]) -> dict[str, Any]:
    """Several runs as one; overhead and bandwidth are the first one's, each cell keeps what its own run measured."""
    results = [json.loads(file.read_text()) for file in files]
    whole = dict(results[0])
    for key in ("cells", "sites", "peers"):
        whole[key] = [entry for result in results for entry in result[key]]
    whole["command"] = "; ".join(result["command"] for result in results)
    return whole


def main() -> None:
    arguments = parse()
    if arguments.roofline:
        rows = roofline.table(models_of(arguments.models), tokens_of(arguments.tokens), arguments.gbps)
        print(json.dumps(rows, indent=2) if arguments.json else report.picked(report.ROOFLINE, rows))
        return
    if arguments.balance:
        models, tokens = models_of(arguments.models), tokens_of(arguments.tokens)
        found = {"steps": balance.table(models, tokens, arguments.gbps), "costs": balance.unevenness(models, tokens)}
        tables = [report.picked(report.BALANCE, found["steps"]), report.picked(list(found["costs"][0]), found["costs"])]
        print(json.dumps(found, indent=2) if arguments.json else "\n\n".join(tables))
        return
    if arguments.correctness:
        from bench.kernels import correctness

        need_gpu()
        sys.exit(correctness.main(arguments.json))
    result = merged(arguments.merge) if arguments.merge else measure(arguments)
    document = json.dumps(result, indent=2)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(document + "\n")
        arguments.out.with_suffix(".md").write_text(report.text(result))
    print(document if arguments.json else report.text(result))


if __name__ == "__main__":
    main()
