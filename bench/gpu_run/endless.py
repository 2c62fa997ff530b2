"""An engine that runs one batch over and over, whatever happens to its server, and says so: JSON lines on stdout.

python -m bench.gpu_run.endless MODEL SERVER --device cuda --transport cuda_ipc NAME...

{"event": "step", "error": E}       its answer, and how far that is from the first one, relative to its norm
{"event": "failed", "reason": ..., "context": "alive"}      a step failed; whether its CUDA context still computes
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from bench.gpu_run.child import be_an_engine, context, engine_flags, say
from client_connector.transformers import attach
from lora_server.demo.engine import load_model

PROMPT = 48  # tokens of each sequence: rows enough that most of a step's time is rows on their way
TIMEOUT_SECONDS = 5.0
PAUSE_SECONDS = 0.2


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = engine_flags(__doc__, transport="cuda_ipc")
    parser.add_argument("names", nargs="+")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the batch until the process is killed, or its CUDA context is dead."""
    given = parse()
    be_an_engine()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = load_model(given.model).to(device, dtype)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 250, (len(given.names), PROMPT), generator=generator).to(device)
    first: torch.Tensor | None = None
    with attach(model, server=given.server, transport=given.transport, timeout_seconds=TIMEOUT_SECONDS) as lora:
        while True:
            try:
                with lora.adapters(given.names):
                    logits = model(ids).logits.double()
                first = logits.clone() if first is None else first
                error = float((logits - first).norm() / first.norm())
            except Exception as problem:
                state = context(device)
                say("failed", reason=f"{type(problem).__name__}: {problem}"[:300], context=state)
                if state != "alive":
                    sys.exit(1)
                time.sleep(PAUSE_SECONDS)
            else:
                say("step", error=error)


if __name__ == "__main__":
    main()
