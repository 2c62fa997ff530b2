"""transformers and PEFT under load, in the protocol of `vllm_child`: mixed batches by `adapter_names`.

generate() takes no request while it runs, so a batch is all requests that are due, up to `batch`, and lasts as long as
its longest answer. Until then requests wait in this process: they were sent when they were due.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.race.load import Call, Job, Seen, answer, repeated
from lora_server.demo.engine import Sequence, load_model, pad

BASE = "__base__"  # PEFT's name for no adapter


class Clock:
    """A logits processor that notes when each step of generate() is over."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.times: list[float] = []

    def now(self) -> float:
        return time.perf_counter() - self._began

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.times.append(self.now())
        return logits


def generate(model: Any, batch: list[tuple[int, Call, float]], clock: Clock) -> list[Seen]:
    """Generate a batch of (number, call, due) greedily; return the outcomes."""
    from transformers import LogitsProcessorList

    ids, mask = pad([Sequence(call.prompt, call.adapter) for _, call, _ in batch], 0)
    most = max(call.new_tokens for _, call, _ in batch)
    clock.times.clear()
    names = [call.adapter or BASE for _, call, _ in batch]
    how = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        input_ids=ids, attention_mask=mask, adapter_names=names, logits_processor=LogitsProcessorList([clock]), **how
    )
    made = out[:, ids.shape[1] :].tolist()
    return [
        Seen(number, due, due, clock.times[: call.new_tokens], tokens[: call.new_tokens])
        for (number, call, due), tokens in zip(batch, made, strict=True)
    ]


def run(model: Any, job: Job, batch: int) -> list[Seen]:
    """Run the job to its end, or until its seconds are over and the batch of that moment has ended."""
    clock, seen = Clock(time.perf_counter()), []
    turns, waiting = repeated(job.calls), list(enumerate(job.calls))
    while clock.now() < job.seconds and (job.width or waiting):
        if job.width:
            now = clock.now()
            due = [(number, call, now) for number, call in itertools.islice(turns, job.width)]
        else:
            time.sleep(max(0.0, waiting[0][1].at - clock.now()))
            now = clock.now()
            due = [(number, call, call.at) for number, call in waiting if call.at <= now][:batch]
            waiting = waiting[len(due) :]
        seen += generate(model, due, clock)
    return seen


def main() -> None:
    """Entry point of the process."""
    from peft import PeftModel

    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    start = msgspec.json.decode(sys.stdin.buffer.readline())
    torch.set_num_threads(start["threads"])
    (first, path), *others = start["paths"].items()
    model = PeftModel.from_pretrained(load_model(Path(start["model"])), path, adapter_name=first).eval()
    for name, other in others:
        model.load_adapter(other, adapter_name=name)
    answer([])
    for line in sys.stdin.buffer:
        answer(run(model, msgspec.json.decode(line, type=Job), start["batch"]))


if __name__ == "__main__":
    main()
