"""Report of the demo: tables for people, and one JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console

from lora_server import terminal
from lora_server.demo.check import PeftVerdict
from lora_server.demo.engine import EngineResult
from lora_server.units import count


@dataclass
class LayoutTimes:
    """One layout, one engine."""

    layout: str
    result: EngineResult

    def row(self) -> dict[str, float | str]:
        """Round for the JSON document."""
        times = self.result.times_us
        return {
            "layout": self.layout,
            "recv_us": round(times.recv, 1),
            "lora_us": round(times.lora, 1),
            "send_us": round(times.send, 1),
            "moe_us": round(times.moe, 1),
            "tokens_per_s": round(self.result.tokens_per_s, 1),
        }


def as_json(verdict: PeftVerdict, layouts: list[LayoutTimes]) -> str:
    """Render the JSON document."""
    document = {
        "passed": verdict.passed,
        "tokens_checked": verdict.tokens_checked,
        "tokens_equal": verdict.tokens_equal,
        "max_abs_logprob_diff": verdict.max_abs_logprob_diff,
        "layouts": [one.row() for one in layouts],
    }
    return json.dumps(document, indent=2)


COLUMNS = ("layout", "Recv", "LoRA", "Send", "base MoE", "tokens/s")
REMARKS = (
    "Send is what the engine waits for after the LoRA is done; hidden by its own GEMM it is near 0.",
    "Engines and shards share this machine's cores: compare the columns, not the numbers elsewhere.",
)
NEXT = """
What next:
  lora-server serve --base-model MODEL --adapters ADAPTERS    # your own
  lora-server adapters add NAME DIR                           # while it serves
  LORA_SERVER_ADDRESS=127.0.0.1:7400 vllm serve MODEL         # an engine"""


def show(verdict: PeftVerdict, layouts: list[LayoutTimes], console: Console) -> None:
    """Print the breakdown per layout (as in the paper's Table 4), the check, and the next steps."""
    console.print("Mean microseconds per layer, experts' gate_up + down (slowest shard)\n")
    terminal.table(console, COLUMNS, [_cells(one) for one in layouts], left=("layout",), wrapped="layout")
    console.print()
    for remark in REMARKS:
        terminal.say(console, remark)
    against = (
        f"against PEFT: {count(verdict.tokens_equal)} of {count(verdict.tokens_checked)} tokens, "
        f"largest |delta logprob| {verdict.max_abs_logprob_diff:.6f}"
    )
    terminal.say(console, against, "equal" if verdict.passed else "DIFFERENT")
    console.print(NEXT)


def _cells(one: LayoutTimes) -> list[str]:
    times = one.result.times_us
    return [one.layout, *map(count, (times.recv, times.lora, times.send, times.moe, one.result.tokens_per_s))]
