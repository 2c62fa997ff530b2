"""Reports of a stage's child process about itself; its parent reads them through `spoken`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def say(event: str, **facts: Any) -> None:
    """One line."""
    print(json.dumps({"event": event, **facts}), flush=True)


def engine_flags(about: str | None, transport: str) -> argparse.ArgumentParser:
    """Make the parser of the flags that every engine process has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("server")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transport", default=transport)
    return parser


def be_an_engine() -> None:
    """First of all: logs go to stderr, since stdout is for the JSON."""
    import torch

    from lora_server import logs

    logs.configure()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)


def context(device: torch.device) -> str:
    """Whether this process can still compute on its device."""
    import torch  # not at the top: who has no device says things too

    try:
        ones = torch.ones(1 << 20, device=device)
        return "alive" if float((ones + ones).sum()) == 2 << 20 else "computes nonsense"
    except Exception as problem:
        return f"dead: {type(problem).__name__}: {str(problem).splitlines()[0]}"
