"""Tokens per second through the server, beside PEFT, and beside the same kernels without a server.

    python -m bench.coupled [--json] [--layout epX-ppY] [--transport auto|shm|tcp]

32 sequences over 16 adapters, one engine on one thread, everything on this machine, one run.
PEFT takes the whole mixed batch (`adapter_names`) where it can, that is on attention; on experts it
cannot, so its adapters go one after another. In-process means the shards of this repository called
by the engine's own thread: what disaggregation itself costs, or gains by overlap.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import harness
from client_connector.transformers import attach
from lora_server import logs, spec
from lora_server.demo.inproc import InprocServer

NUM_SEQUENCES, NUM_ADAPTERS, RANKS, PROMPT = 32, 16, (8, 16, 32, 64), 8
TOY: dict[str, Any] = {}
REALISTIC = {
    "hidden_size": 2048,
    "intermediate_size": 2816,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
}
# name, model overrides, what the adapters target, new tokens
CASES = (
    ("toy, experts", TOY, "experts", 16),
    ("toy, attention", TOY, "attention", 16),
    ("realistic, experts", REALISTIC, "experts", 4),
    ("realistic, attention", REALISTIC, "attention", 4),
)


class Case:
    """A model, its adapters on disk, and 32 prompts."""

    def __init__(self, work: Path, overrides: dict[str, Any], targets: str, new_tokens: int) -> None:
        self.new_tokens, self.targets = new_tokens, targets
        names = [f"tenant-{i:02d}" for i in range(NUM_ADAPTERS)]
        adapters = {name: {"lora_rank": RANKS[i % len(RANKS)], "targets": targets} for i, name in enumerate(names)}
        self.model = harness.make(work, "mixtral", adapters, **overrides)
        self.paths = {name: work / "adapters" / name for name in names}
        self.names = [names[i % NUM_ADAPTERS] for i in range(NUM_SEQUENCES)]
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, 250, (NUM_SEQUENCES, PROMPT), generator=generator)

    def tokens_per_s(self, generate: Callable[[], None], runs: int = 3) -> float:
        """Best of some runs."""
        return NUM_SEQUENCES * self.new_tokens / harness.least_s(runs, generate)

    def generate(self, model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        """Greedy, a fixed number of tokens."""
        count = self.new_tokens
        out: torch.Tensor = model.generate(
            input_ids=ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **more
        )
        return out

    def attached(self, server: Any, transport: str) -> tuple[float, torch.Tensor]:
        """Through our connector: tokens/s, and the tokens."""
        tokens = []
        with attach(self.model, server=server, transport=transport) as lora, lora.adapters(self.names):
            speed = self.tokens_per_s(lambda: tokens.append(self.generate(self.model, self.ids)))
        return speed, tokens[-1]

    def peft(self) -> tuple[float, torch.Tensor]:
        """PEFT's best way through the same work. Works on the model itself, so it comes last."""
        from peft import PeftModel

        first, *others = self.paths.items()
        model = PeftModel.from_pretrained(self.model, str(first[1]), adapter_name=first[0]).eval()
        for name, path in others:
            model.load_adapter(str(path), adapter_name=name)
        rows = {name: [i for i, own in enumerate(self.names) if own == name] for name in self.paths}
        out = torch.zeros(NUM_SEQUENCES, PROMPT + self.new_tokens, dtype=torch.int64)

        def mixed() -> None:
            out.copy_(self.generate(model, self.ids, adapter_names=self.names))

        def in_turn() -> None:
            for name, own in rows.items():
                model.set_adapter(name)
                out[own] = self.generate(model, self.ids[own])

        slow = self.targets != "attention"  # minutes at a realistic width: one run, as its start hardly counts
        return self.tokens_per_s(in_turn if slow else mixed, runs=1 if slow else 3), out


def measure(layout: str, transport: str) -> list[dict[str, Any]]:
    rows = []
    for name, overrides, targets, new_tokens in harness.progress(CASES, "generating"):
        with harness.scratch() as work:
            case = Case(work, overrides, targets, new_tokens)
            with harness.serving(work, "--layout", layout) as server:
                ours, tokens = case.attached(server.address, transport)
            local = InprocServer(spec.load(work / "base"), case.paths, layout=layout)
            inproc, _ = case.attached(local, transport)
            local.close()
            peft, expected = case.peft()
        speeds = {"tokens_per_s": ours, "inproc_tokens_per_s": inproc, "peft_tokens_per_s": peft}
        equal = float((tokens == expected).float().mean())
        rows.append({"case": name, **speeds, "to_peft": ours / peft, "to_inproc": ours / inproc, "tokens_equal": equal})
    return rows


COLUMNS = (
    "case {case} | server {tokens_per_s:,.0f} | in-process {inproc_tokens_per_s:,.0f} | "
    "PEFT {peft_tokens_per_s:,.0f} | server / PEFT {to_peft:.2f} | server / in-process {to_inproc:.2f} | "
    "tokens = PEFT's {tokens_equal:.1%}"
)


def main() -> None:
    given = harness.flags(__doc__, layout="ep1-pp1", transport="auto")
    warnings.simplefilter("ignore")
    logs.configure(logging.WARNING)
    harness.one_thread()
    rows = measure(given.layout, given.transport)
    title = f"Tokens/s, {NUM_SEQUENCES} sequences, {NUM_ADAPTERS} adapters, {given.layout}"
    harness.show(given, rows, harness.table(title, rows, COLUMNS))


if __name__ == "__main__":
    main()
