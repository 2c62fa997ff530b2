"""An engine in NVSHMEM's world that does what it is told: JSON lines on stdin, one answer each on stdout.

python -m bench.gpu_run.world_engine MODEL SERVER --device cuda --transport nvshmem --new-tokens N

{"do": "join"}       -> "joined": once all are there
{"do": "generate"}   -> "generated": greedy tokens [B, N], logits after the prompt [B, V], seconds
{"do": "leave"}      -> "left"; it may join again
{"do": "measure", "rows": n, "rounds": n}      -> "measured": steps at one site, once it has left; see world_timing
{"do": "passes"}     -> "passed": a serving engine's pass at a layer's sites, once it has left; see passes
anything that fails  -> "failed": the error's code and text, and whether this process can still compute
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_run import passes, world_timing
from bench.gpu_run.child import be_an_engine, context, engine_flags, say
from bench.gpu_run.engine import generate
from bench.gpu_run.lab import NAMES
from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server.demo.engine import load_model

if TYPE_CHECKING:
    from client_connector.transformers.hook import Attachment

ADAPTERS: tuple[str | None, ...] = (*NAMES, None)  # of the batch's sequences
PROMPT = 12
JOIN_SECONDS = 90.0  # until all are there, and for a step


def prompts() -> torch.Tensor:
    """[B, PROMPT], of every model that has 250 tokens."""
    return torch.randint(3, 250, (len(ADAPTERS), PROMPT), generator=torch.Generator().manual_seed(5))


class Engine:
    """One model, and its link to the server while it has joined."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.device = given, torch.device(given.device)
        self.model: Any = load_model(given.model).to(self.device, torch.bfloat16)
        self.ids = prompts().to(self.device)
        self.lora: Attachment | None = None

    def join(self) -> dict[str, Any]:
        """Waits for the world."""
        given = self.given
        self.lora = attach(self.model, server=given.server, transport=given.transport, timeout_seconds=JOIN_SECONDS)
        return {"event": "joined"}

    def generate(self) -> dict[str, Any]:
        """Run the batch with ADAPTERS; return its tokens, logits and seconds."""
        assert self.lora is not None
        began = time.perf_counter()
        with self.lora.adapters(ADAPTERS):
            logits = self.model(self.ids).logits[:, -1].float()
            tokens = generate(self.model, self.ids, self.given.new_tokens)
        seconds = time.perf_counter() - began
        return {
            "event": "generated",
            "tokens": tokens.tolist(),
            "logits": logits.tolist(),
            "seconds": round(seconds, 3),
        }

    def leave(self) -> dict[str, Any]:
        """Back to the base model."""
        assert self.lora is not None
        self.lora.detach()
        return {"event": "left"}

    def measure(self, rows: int, rounds: int) -> dict[str, Any]:
        """See world_timing."""
        server = RemoteServer(self.given.server, self.given.transport, device=self.given.device)
        return {"event": "measured", "found": world_timing.measure(server, self.device, rows, rounds)}

    def passes(self) -> dict[str, Any]:
        """Compare a serving engine's passes with a host's over TCP; on a GPU also in a graph."""
        server, transport, device = self.given.server, self.given.transport, self.given.device
        with passes.by_host(server, "tcp") as oracle, passes.by_launches(server, transport, device) as layer:
            graph = {"replayed": passes.captured(layer).replay} if device == "cuda" else {}
            return {"event": "passed", "found": passes.judged(layer, oracle, graph | {"eager": layer.run})}

    def obey(self, do: str, **more: Any) -> None:
        """One line of stdin."""
        deeds: dict[str, Callable[..., dict[str, Any]]] = {
            deed.__name__: deed for deed in (self.join, self.generate, self.leave, self.measure, self.passes)
        }
        try:
            answer = deeds[do](**more)
        except Exception as error:
            code, reason = getattr(error, "code", type(error).__name__), f"{type(error).__name__}: {error}"[:300]
            answer = {"event": "failed", "code": code, "reason": reason, "context": context(self.device)}
        say(**answer)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = engine_flags(__doc__, transport="nvshmem")
    parser.add_argument("--new-tokens", type=int, default=16)
    return parser.parse_args(arguments)


def main() -> None:
    """Obey the lines of stdin until it ends."""
    given = parse()
    be_an_engine()
    engine = Engine(given)
    for line in sys.stdin:
        engine.obey(**json.loads(line))


if __name__ == "__main__":
    main()
