"""What the demo found, as tables for people and as one JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lora_server.demo.check import Verdict
from lora_server.demo.engine import Result


@dataclass
class LayoutTimes:
    """One layout, one engine."""

    layout: str
    result: Result

    def row(self) -> dict[str, float | str]:
        """For the JSON."""
        times = self.result.times_us
        return {
            "layout": self.layout,
            "recv_us": round(times.recv, 1),
            "lora_us": round(times.lora, 1),
            "send_us": round(times.send, 1),
            "moe_us": round(times.moe, 1),
            "tokens_per_s": round(self.result.tokens_per_s, 1),
        }


def as_json(verdict: Verdict, layouts: list[LayoutTimes]) -> str:
    """One document."""
    document = {
        "passed": verdict.passed,
        "tokens_checked": verdict.tokens_checked,
        "tokens_equal": verdict.tokens_equal,
        "max_abs_logprob_diff": verdict.max_abs_logprob_diff,
        "layouts": [one.row() for one in layouts],
    }
    return json.dumps(document, indent=2)


def show(verdict: Verdict, layouts: list[LayoutTimes], console: Console) -> None:
    """The breakdown per layout (as in the paper's Table 4), and the check."""
    table = Table(title="Mean microseconds per layer, experts' gate_up + down (slowest shard)", title_justify="left")
    for column in ("layout", "Recv", "LoRA", "Send", "base MoE", "tokens/s"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for one in layouts:
        row = one.row()
        numbers = (row[key] for key in ("recv_us", "lora_us", "send_us", "moe_us", "tokens_per_s"))
        table.add_row(one.layout, *(f"{number:,.0f}" for number in numbers))
    console.print(table)
    console.print(
        "Send is what the engine waits for after the LoRA is done; hidden by its own GEMM it is near 0.\n"
        "Engines and shards share this machine's cores: compare the columns, not the numbers elsewhere."
    )
    word = "[bold green]equal[/]" if verdict.passed else "[bold red]DIFFERENT[/]"
    console.print(
        f"against PEFT: {verdict.tokens_equal} of {verdict.tokens_checked} tokens equal, "
        f"largest |delta logprob| {verdict.max_abs_logprob_diff:.1e}: {word}"
    )
