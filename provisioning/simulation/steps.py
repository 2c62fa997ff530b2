"""Step by step: engines that schedule as vLLM's do, where `run` has whole batches pass on a clock.

Rules (those of vLLM's scheduler, v1/core/sched/scheduler.py; requests are never preempted for KV cache):

1. A step has a budget of `max_tokens`. Requests that run come first: each decodes a token, or goes on with its prompt.
2. Then requests join that wait, first come first served, while there are budget and places (`max_seqs`). A prompt that
   exceeds the budget is computed in chunks.
3. Coupled: as many adapters as there are slots run at once. A request of another one is skipped, and later requests may
   overtake it. An adapter that is not in a slot is loaded within the step, which all requests of the step wait for; it
   takes the slot of the one used least recently.
4. With a LoRA server an adapter is loaded beside the steps, into slots that all engines share, and its requests join
   when it is there: they hold up no others.
5. A step takes what was measured for its decoding requests, their adapters and prompt tokens (`EngineSteps`). The first
   token comes at the end of the step that completes the prompt. A request waits `entry_s` before it can join.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from provisioning.model.engine_steps import EngineSteps
from provisioning.simulation.engine import Moments
from provisioning.simulation.router import LoraRouter
from provisioning.simulation.run import SimulationResult
from provisioning.simulation.state import AdapterState, SlotCache
from provisioning.simulation.step_engine import StepCalls, StepEngine
from provisioning.workload.requests import Requests

MOST_ENGINES = 100  # beyond, a run takes long


@dataclass(frozen=True, kw_only=True)
class StepSystem:
    """Engines, each with `slots` of its own or all with those of a LoRA server (`shared`), which loads in `load_s`.

    `read` are adapters that were read in this order before the first request: the last ones are in the slots.
    """

    steps: EngineSteps
    slots: int
    shared: bool
    instances: int = 1
    load_s: float = 0.0
    read: Sequence[int] = ()


def run_steps(requests: Requests, system: StepSystem) -> SimulationResult:
    """Play the requests through the engines, step by step, to the last token."""
    moments, steps = Moments(len(requests)), system.steps
    given = requests.input_tokens
    prompts = [1] * len(requests) if given is None else np.maximum(given, 1).tolist()
    tokens = np.maximum(requests.output_tokens, 1).tolist()
    calls = StepCalls(prompt_left=prompts, tokens=tokens, moments=moments)
    server = _ServerSlots(system, requests.num_adapters) if system.shared else None
    released = server.grant if server else None
    engines = [StepEngine(steps, calls, released) for _ in range(system.instances)]
    router = LoraRouter(engines, [SlotCache(system.slots) for _ in engines], steps.max_seqs)
    for number, adapter in enumerate(system.read):
        state = server.states[adapter] if server else router.choose(adapter, number % len(engines))
        state.hold()
        state.release()
    for request, (now_s, adapter) in enumerate(
        zip(requests.arrival_s.tolist(), requests.adapter.tolist(), strict=True)
    ):
        _advance(engines, now_s)
        least = min(range(len(engines)), key=lambda one: engines[one].load)
        if server:
            server.ask(request, adapter, engines[least], now_s)
        else:
            state = router.choose(adapter, least)
            engines[state.owner or 0].enter(request, state, now_s + steps.entry_s)
    _advance(engines, math.inf)
    admit, first, finish = (np.array(one) for one in (moments.admit, moments.first, moments.finish))
    return SimulationResult(requests, admit, first, finish, np.array(moments.immediate, dtype=bool))


def _advance(engines: list[StepEngine], until_s: float) -> None:
    """Take all steps that begin before `until_s`, in order."""
    while (engine := min(engines, key=lambda one: one.begins_s)).begins_s < until_s:
        engine.step()


class _ServerSlots:
    """The slots of a LoRA server: a request has one from before its adapter is loaded to its last token."""

    def __init__(self, system: StepSystem, num: int) -> None:
        self._cache, self._system = SlotCache(system.slots), system
        self.states = [AdapterState(self._cache, None, adapter) for adapter in range(num)]
        self._loaded_s = [0.0] * num
        self._waiting = dict[int, deque[tuple[int, StepEngine, float]]]()  # by adapter, the longest wait first

    def ask(self, request: int, adapter: int, engine: StepEngine, now_s: float) -> None:
        """Let a request enter its engine once its adapter is loaded; it may wait for a slot first."""
        enters_s = now_s + self._system.steps.entry_s
        if adapter in self._waiting or not self._enter(request, adapter, engine, enters_s, now_s):
            self._waiting.setdefault(adapter, deque()).append((request, engine, enters_s))

    def grant(self, now_s: float) -> None:
        """Give free and idle slots to the adapters that wait longest."""
        while self._waiting and (self._cache.free or self._cache.idle):
            adapter = next(iter(self._waiting))
            for request, engine, enters_s in self._waiting.pop(adapter):
                self._enter(request, adapter, engine, max(enters_s, now_s), now_s)

    def _enter(self, request: int, adapter: int, engine: StepEngine, enters_s: float, now_s: float) -> bool:
        state = self.states[adapter]
        resident = state.hold()
        if resident is None:
            return False
        if not resident:
            self._loaded_s[adapter] = now_s + self._system.load_s
        engine.enter(request, state, max(enters_s, self._loaded_s[adapter]))
        return True
