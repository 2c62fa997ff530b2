"""Make a profile for `provision --profile` of what `make gpu` found: compute, by its stage `headline`.

    python -m bench.profile --gpu-run bench/out/gpu_run/H200 --out profile.json

`lora-server profile` measures a machine's CPUs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.gpu_run import planner, record
from lora_server.errors import ConfigError


def of_gpu_run(folder: Path, transport: str) -> dict[str, Any]:
    """The compute terms that `make gpu` measured. Raises ConfigError where the stage did not come to them."""
    try:
        return planner.profile(record.read(folder / "headline.jsonl"), transport)
    except ConfigError as error:
        raise ConfigError(f"--gpu-run: {folder}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu-run", type=Path, required=True, help="a GPU's folder of bench/out/gpu_run")
    parser.add_argument("--transport", default="gpu", help="the transport of the run's kernels (default: gpu)")
    arguments = parser.parse_args()
    found = of_gpu_run(arguments.gpu_run, arguments.transport)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
