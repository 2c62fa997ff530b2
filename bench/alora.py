"""aLoRA against LoRA in vLLM: base -> adapter -> base over one growing context, in one run.

    make bench-vllm

x is the prompt, y what the base model answers, r what the adapter says to x + y + invocation; then
the base model goes on from all of it. Both adapters are alike but for the invocation. Reported per
stage: prompt tokens that had to be computed (the rest came from the prefix cache), and seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.cold_vllm import open_llm

INVOCATION = [17, 18, 19, 20]
Y_TOKENS, R_TOKENS = 64, 16
# large enough that prefill takes visible time on a CPU, small enough to make here
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}


class Pipeline:
    def __init__(self, base: Path, longest: int) -> None:
        self.llm = open_llm(base, longest + 512)

    def ask(self, prompt: list[int], name: str | None, tokens: int) -> tuple[list[int], int, float]:
        """Generate `tokens` tokens. Returns them, the number of prompt tokens computed, and the seconds it took."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None if name is None else LoRARequest(name, 1 + ("alora", "lora").index(name), "by-name")
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, detokenize=False)
        began = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, lora_request=lora, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert output.outputs[0].stop_reason is None, output.outputs[0].stop_reason
        return list(output.outputs[0].token_ids), len(prompt) - (output.num_cached_tokens or 0), seconds

    def run(self, x: list[int], name: str) -> list[tuple[int, float]]:
        """Call base model, adapter, base model in turn; return (prompt tokens computed, seconds) of each."""
        y, *first = self.ask(x, None, Y_TOKENS)
        r, *second = self.ask([*x, *y, *INVOCATION], name, R_TOKENS)
        _, *third = self.ask([*x, *y, *INVOCATION, *r], None, R_TOKENS)
        return [(int(tokens), seconds) for tokens, seconds in (first, second, third)]


def main() -> None:
    given = harness.flags(__doc__, json=False, lengths=[256, 512, 1024, 2048, 4096], repeats=3)
    alike = {"seed": 5, "lora_rank": 16, "targets": "attention"}
    with harness.scratch() as root:
        harness.make(root, "mixtral", {"alora": {**alike, "invocation": INVOCATION}, "lora": alike}, **MODEL)
        with harness.serving(root, "--max-step-rows", "1024") as server:
            os.environ["LORA_SERVER_ADDRESS"] = server.address
            report(Pipeline(root / "base", max(given.lengths)), given.lengths, given.repeats)


def report(pipeline: Pipeline, lengths: list[int], repeats: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pipeline.run(torch.randint(30, 250, (64,), generator=generator).tolist(), "alora")  # the first step is slow
    print("| x | | base: computed, s | adapter: computed, s | base again: computed, s | adapter stage, LoRA / aLoRA |")
    print("|---|---|---|---|---|---|")
    for length in lengths:
        best: dict[str, list[tuple[int, float]]] = {}
        for _ in range(repeats):
            for name in ("lora", "alora"):  # every run has a text of its own, so that nothing is cached before it
                stages = pipeline.run(torch.randint(30, 250, (length,), generator=generator).tolist(), name)
                old = best.get(name, stages)
                best[name] = [min(pair, key=lambda stage: stage[1]) for pair in zip(old, stages, strict=True)]
        ratio = best["lora"][1][1] / best["alora"][1][1]
        for name in ("lora", "alora"):
            cells = " | ".join(f"{tokens}, {seconds:.3f}" for tokens, seconds in best[name])
            print(f"| {length} | {name} | {cells} | {f'{ratio:.1f}x' if name == 'alora' else ''} |", flush=True)


if __name__ == "__main__":
    main()
