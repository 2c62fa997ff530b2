"""One engine process: a transformers model without adapters, attached to the server.

One line of JSON on stdin is the job, one on stdout the result: `python -m lora_server.demo.engine`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from client_connector.exchange import GemmTimes, StepTimes
from lora_server import logs
from lora_server.spec import EXPERT_PROJECTIONS, Site


class Sequence(msgspec.Struct):
    """A prompt and the adapter that answers it (None: the base model)."""

    prompt: list[int]
    adapter: str | None


class Job(msgspec.Struct):
    """Batches to generate, one after another."""

    model: str
    server: str
    batches: list[list[Sequence]]
    new_tokens: int
    transport: str = "auto"


class EngineAnswer(msgspec.Struct):
    """Greedy tokens of one sequence, and the log probability of each."""

    tokens: list[int]
    logprobs: list[float]


class Times(msgspec.Struct):
    """Median microseconds per layer of expert sites (both projections); `layer` is all of it, attention included."""

    recv: float = 0.0
    lora: float = 0.0
    send: float = 0.0
    moe: float = 0.0
    layer: float = 0.0


class EngineResult(msgspec.Struct):
    """Answers by batch, and the engine's speed."""

    answers: list[list[EngineAnswer]]
    tokens_per_s: float
    times_us: Times


class Stopwatch:
    """Collects step times; one exchange is as slow as its slowest shard.

    Send counts from the end of the LoRA computation, or from when the client began to wait if that
    was later: what the engine's own GEMM hides costs nothing.
    """

    def __init__(self) -> None:
        self._exchanges: dict[tuple[Site, int], list[StepTimes]] = defaultdict(list)
        self._gemms = list[GemmTimes]()

    def step(self, times: StepTimes) -> None:
        """Observe one message."""
        if times.site.projection in EXPERT_PROJECTIONS:
            self._exchanges[times.site, len(self._gemms)].append(times)

    def gemm(self, times: GemmTimes) -> None:
        """Observe one of the engine's own GEMMs; runs once per site of a forward pass."""
        if times.site.projection in EXPERT_PROJECTIONS:
            self._gemms.append(times)

    def medians(self, *, decode: bool = True) -> Times:
        """Return the times per layer, gate_up and down together, of decode steps or of prompts."""
        exchanges = [steps for steps in self._exchanges.values() if steps[0].decode == decode]
        gemms = [times for times in self._gemms if times.decode == decode]
        by_site = [(steps[0].site, steps) for steps in exchanges]
        return Times(
            recv=_sum_us((site, max(t.received_ns - t.pushed_ns for t in steps)) for site, steps in by_site),
            lora=_sum_us((site, max(t.done_ns - t.started_ns for t in steps)) for site, steps in by_site),
            send=_sum_us(
                (site, max(t.arrived_ns - max(t.done_ns, t.waited_ns) for t in steps)) for site, steps in by_site
            ),
            moe=_sum_us((times.site, times.ended_ns - times.began_ns) for times in gemms),
            layer=_layer_us(gemms),
        )


def _sum_us(times_ns: Iterable[tuple[Site, int]]) -> float:
    """Add the medians of the projections, in microseconds."""
    found: dict[str, list[int]] = defaultdict(list)
    for site, ns in times_ns:
        found[site.projection].append(ns)
    return sum(statistics.median(its) for its in found.values()) / 1e3


def _layer_us(gemms: list[GemmTimes]) -> float:
    """Return the time from a layer's first GEMM to the next layer's, in microseconds; 0 for a model of one layer."""
    firsts = [times for times in gemms if times.site.projection == gemms[0].site.projection]
    periods_ns = [b.began_ns - a.began_ns for a, b in pairwise(firsts) if b.site.layer > a.site.layer]
    return statistics.median(periods_ns) / 1e3 if periods_ns else 0.0


def pad(batch: list[Sequence], pad_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a batch on the left: ids and mask, [B, S] int64."""
    longest = max(len(sequence.prompt) for sequence in batch)
    ids = torch.full((len(batch), longest), pad_token, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(batch):
        ids[row, longest - len(sequence.prompt) :] = torch.tensor(sequence.prompt)
        mask[row, longest - len(sequence.prompt) :] = 1
    return ids, mask


def generate(model: torch.nn.Module, batch: list[Sequence], new_tokens: int) -> list[EngineAnswer]:
    """Decode greedily, exactly `new_tokens` per sequence."""
    ids, mask = pad(batch, 0)
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2)
    return [EngineAnswer(t, p) for t, p in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def load_model(path: str | Path) -> torch.nn.Module:
    """Load a float32 model from a directory, in eval mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def run(job: Job) -> EngineResult:
    """Generate every batch; prefill counts for tokens/s but not for the step times."""
    from client_connector.transformers import attach

    model = load_model(job.model)
    watch = Stopwatch()
    answers = []
    with attach(model, server=job.server, transport=job.transport) as lora:
        with lora.adapters([sequence.adapter for sequence in job.batches[0]]):
            generate(model, job.batches[0], 2)  # warm up
        lora.observe(watch.step, watch.gemm)
        began = time.monotonic()
        for batch in job.batches:
            with lora.adapters([sequence.adapter for sequence in batch]):
                answers.append(generate(model, batch, job.new_tokens))
        seconds = time.monotonic() - began
    tokens = sum(len(batch) for batch in job.batches) * job.new_tokens
    return EngineResult(answers, tokens / seconds, watch.medians())


def main() -> None:
    """Entry point of the process."""
    logs.configure()  # stdout is for the result
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(run(job)) + b"\n")


if __name__ == "__main__":
    main()
