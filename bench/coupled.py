"""Tokens per second through the server, beside PEFT, and beside the same kernels without a server.

    python -m bench.coupled [--json] [--layout epX-ppY] [--transport auto|shm|tcp]

32 sequences over 16 adapters, one engine on one thread, everything on this machine, one run.
PEFT takes the whole mixed batch (`adapter_names`) where it can, that is on attention; on experts it
cannot, so its adapters go one after another. In-process means the shards of this repository called
by the engine's own thread: what disaggregation itself costs, or gains by overlap.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from client_connector.transformers import attach
from lora_server import logs, spec
from lora_server.daemon.inproc import InprocServer
from lora_server.demo import tiny
from lora_server.demo.launch import running_server

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
        self.base, self.adapters, self.new_tokens, self.targets = work / "base", work / "adapters", new_tokens, targets
        self.model = tiny.make_model("mixtral", **overrides)
        tiny.save_model(self.model, self.base)
        self.paths = {f"tenant-{i:02d}": self.adapters / f"tenant-{i:02d}" for i in range(NUM_ADAPTERS)}
        for index, path in enumerate(self.paths.values()):
            rank = RANKS[index % len(RANKS)]
            tiny.make_adapter(self.model, path, lora_rank=rank, seed=index, targets=targets)
        self.names = [list(self.paths)[i % NUM_ADAPTERS] for i in range(NUM_SEQUENCES)]
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, 250, (NUM_SEQUENCES, PROMPT), generator=generator)

    def tokens_per_s(self, generate: Callable[[], None], runs: int = 3) -> float:
        """Best of some runs."""
        seconds = []
        for _ in range(runs):
            began = time.perf_counter()
            generate()
            seconds.append(time.perf_counter() - began)
        return NUM_SEQUENCES * self.new_tokens / min(seconds)

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

        slow = self.targets != "attention"  # minutes at a realistic width: one run, whose start hardly counts
        return self.tokens_per_s(in_turn if slow else mixed, runs=1 if slow else 3), out


def measure(layout: str, transport: str) -> list[dict[str, Any]]:
    """One row per case."""
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=4 * len(CASES))
        for name, overrides, targets, new_tokens in CASES:
            with tempfile.TemporaryDirectory() as scratch:
                case = Case(Path(scratch), overrides, targets, new_tokens)
                progress.advance(task)
                flags = ["--base-model", str(case.base), "--adapters", str(case.adapters), "--layout", layout]
                with running_server(Path(scratch) / "log", flags) as server:
                    ours, tokens = case.attached(server.address, transport)
                progress.advance(task)
                local = InprocServer(spec.load(case.base), case.paths, layout=layout)
                inproc, _ = case.attached(local, transport)
                local.close()
                progress.advance(task)
                peft, expected = case.peft()
                progress.advance(task)
            rows.append(
                {
                    "case": name,
                    "tokens_per_s": ours,
                    "inproc_tokens_per_s": inproc,
                    "peft_tokens_per_s": peft,
                    "to_peft": ours / peft,
                    "to_inproc": ours / inproc,
                    "tokens_equal": float((tokens == expected).float().mean()),
                }
            )
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layout", default="ep1-pp1")
    parser.add_argument("--transport", default="auto")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logs.configure(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = measure(arguments.layout, arguments.transport)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"Tokens/s, {NUM_SEQUENCES} sequences, {NUM_ADAPTERS} adapters, {arguments.layout}")
    for column in ("case", "server", "in-process", "PEFT", "server / PEFT", "server / in-process", "tokens = PEFT's"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        speeds = (f"{row[key]:,.0f}" for key in ("tokens_per_s", "inproc_tokens_per_s", "peft_tokens_per_s"))
        ratios = (f"{row['to_peft']:.2f}", f"{row['to_inproc']:.2f}", f"{row['tokens_equal']:.1%}")
        table.add_row(row["case"], *speeds, *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
