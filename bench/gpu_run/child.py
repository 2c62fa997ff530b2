"""What the child process of a stage says of itself; its parent hears it through `spoken`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def say(event: str, **facts: Any) -> None:
    """One line."""
    print(json.dumps({"event": event, **facts}), flush=True)


def context(device: torch.device) -> str:
    """Whether this process can still compute on its device."""
    import torch  # not at the top: who has no device says things too

    try:
        ones = torch.ones(1 << 20, device=device)
        return "alive" if float((ones + ones).sum()) == 2 << 20 else "computes nonsense"
    except Exception as problem:
        return f"dead: {type(problem).__name__}: {str(problem).splitlines()[0]}"
