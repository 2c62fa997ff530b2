"""Coupled instances step by step, as vLLM schedules them, beside the planner's simulation of the same calls.

    python -m bench.coupled_steps [--out FILE]

What vLLM's scheduler (version 1) does in each step, and the planner's simulation does not: a step has at most
`max_num_batched_tokens` tokens and `max_num_seqs` requests; running requests come first, one token each or the next
chunk of their prompt; then waiting ones, first come first served, as much of each prompt as is left of the step; one
whose adapter has no slot (`max_loras`) is passed over, for this step; and an adapter that is not there is copied to the
GPU before the step, which all of its requests wait for. A step takes as long as the model says of its decode tokens
and its prompt tokens. TTFT is until the first step that computes of a request's prompt, plus a decode step: without its
own prefill, as in the planner. The router is the planner's, by the caches as they are.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from provisioning.arrays import Floats
from provisioning.plan.coupled import Coupled, _system, coupled
from provisioning.plan.judge import played
from provisioning.plan.question import Scenario
from provisioning.simulation.measure import measured
from provisioning.simulation.run import run
from provisioning.workload.requests import Requests
from tests.support.provision import question

MOST_TOKENS, MOST_REQUESTS = 2048, 256
_MORE, _FEW = 1.25, 2


@dataclass(eq=False)
class Instance:
    """An engine at `now`, the end of its last step. `left`: prompt tokens and output tokens of running requests."""

    slots: int
    now: float = 0.0
    running: dict[int, list[int]] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    resident: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class Steps:
    """The instances, and the time of a step."""

    def __init__(self, found: Coupled, requests: Requests, load_s: float) -> None:
        model, self.calls = found.scenario.model, requests
        self.instances = [Instance(found.split.slots) for _ in range(found.instances)]
        decode = model.without_prompts()
        self.decode_s = [decode.coupled_step_us(max(batch, 1)) * 1e-6 for batch in range(MOST_REQUESTS + 1)]
        lora_us = model.spec.layers * model.prompt(model.instance_gpus).lora.compute.value
        self.prompt_s = (model.base.prefill_us + lora_us) * 1e-6
        self.prompt_tokens, self.load_s = max(round(model.prompt_tokens), 1), load_s
        self.first = np.full(len(requests), np.nan)

    def play(self) -> Floats:
        """TTFT of each request."""
        for call, at in enumerate(self.calls.arrival_s):
            for instance in self.instances:
                self.until(instance, at)
            self.choose(int(self.calls.adapter[call])).waiting.append(call)
        for instance in self.instances:
            self.until(instance, np.inf)
        return np.asarray(self.first - self.calls.arrival_s)

    def choose(self, adapter: int) -> Instance:
        least = min(self.instances, key=lambda one: one.load)
        near = [one for one in self.instances if adapter in one.resident and one.load <= _MORE * least.load + _FEW]
        return min(near, key=lambda one: one.load) if near else least

    def until(self, instance: Instance, end: float) -> None:
        """Run the steps that begin before `end`."""
        while instance.now < end and (instance.running or instance.waiting):
            arrived = instance.waiting and self.calls.arrival_s[instance.waiting[0]]
            if not instance.running and arrived:
                instance.now = max(instance.now, float(arrived))
                if instance.now >= end:
                    return
            self.step(instance)
        instance.now = max(instance.now, end) if np.isfinite(end) else instance.now

    def step(self, instance: Instance) -> None:
        budget, loads, prompts, decoding, begun = MOST_TOKENS, 0, 0, 0, list[int]()
        for left in instance.running.values():
            take = min(left[0], budget) if left[0] else min(1, budget)
            prompts, decoding = prompts + (take if left[0] else 0), decoding + (not left[0])
            budget -= take
            left[0], left[1] = (left[0] - take, left[1]) if left[0] else (0, left[1] - take)
        passed = deque[int]()
        active = {int(self.calls.adapter[call]) for call in instance.running}
        while instance.waiting and budget > 0 and len(instance.running) < MOST_REQUESTS:
            call = instance.waiting.popleft()
            adapter = int(self.calls.adapter[call])
            if adapter not in active and len(active) >= instance.slots:
                passed.append(call)
                continue
            if adapter not in instance.resident:
                while len(instance.resident) >= instance.slots:
                    del instance.resident[next(one for one in instance.resident if one not in active)]
                instance.resident[adapter] = None
                loads += 1
            instance.resident.move_to_end(adapter)
            active.add(adapter)
            take = min(self.prompt_tokens, budget)
            budget, prompts = budget - take, prompts + take
            instance.running[call] = [self.prompt_tokens - take, int(self.calls.output_tokens[call])]
            begun.append(call)
        instance.waiting.extendleft(reversed(passed))
        began, first_s = instance.now, self.decode_s[min(max(decoding, 1), MOST_REQUESTS)]
        instance.now += first_s + prompts * self.prompt_s * bool(self.prompt_tokens > 1) + loads * self.load_s
        for call in begun:
            self.first[call] = began + loads * self.load_s + first_s
        for call in [call for call, left in instance.running.items() if not left[0] and left[1] <= 0]:
            del instance.running[call]


CELLS = (
    ("prompts apart", {"prefill": "apart"}),
    ("prompts apart, Zipf 0.8", {"prefill": "apart", "zipf": 0.8}),
    ("prompts shared", {"prompt_tokens": 300.0}),
    ("prompts shared, long", {"prompt_tokens": 900.0}),
    ("bursts", {"prefill": "apart", "burst_cv": 2.0}),
    ("batch near the limit", {"prefill": "apart", "batch_size": 200.0}),
)


def row(name: str, asked: Scenario, instances: int) -> str:
    found = coupled(asked, instances)
    system = _system(found.scenario, found.instances, found.split, found.step_us)
    requests = played(found.scenario, found.step_us, 1)
    kept = slice(0, min(len(requests), 12_000))
    requests = replace(requests.part(kept))
    slo_s = asked.slo.ttft_us * 1e-6
    outcome = run(requests, system)
    after = measured(outcome)
    ours = float((outcome.ttft_s[after] <= slo_s).mean())
    theirs = Steps(found, requests, system.load_s).play()[after]
    exact = float((theirs <= slo_s).mean())
    return f"| {name} | {instances} x {found.split.slots} | {ours:.4f} | {exact:.4f} | {100 * (ours - exact):+.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = ["| cell | instances x slots | planner's | step by step | points |", "|---|---|---|---|---|"]
    print("\n".join(lines))
    for name, flags in CELLS:
        for instances in (4, 6):
            asked = question(adapters=200, gpu="h200", **flags)
            lines.append(row(name, asked, instances))
            print(lines[-1], flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
