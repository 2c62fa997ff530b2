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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from provisioning.model.engine_steps import EngineSteps
from provisioning.simulation.router import LoraRouter
from provisioning.simulation.run import Moments, SimulationResult
from provisioning.simulation.state import AdapterState, SlotCache
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


@dataclass(frozen=True, eq=False, kw_only=True)
class StepCalls:
    """The requests: prompt tokens that are left to compute, tokens to generate, and their moments."""

    prompt_left: list[int]
    tokens: list[int]
    moments: Moments


class StepEngine:
    """The requests of an engine: those that enter, wait, compute their prompts, and decode.

    Coupled, a request takes a slot when it joins; else (`shared`) it has one when it enters, and `released` is told the
    time at which one is free again. `batch` has the adapters of the requests that run.
    """

    def __init__(self, steps: EngineSteps, calls: StepCalls, released: Callable[[float], None] | None = None) -> None:
        self._steps, self._calls, self._released = steps, calls, released
        self._entering = list[tuple[float, int, AdapterState]]()
        self._waiting = list[tuple[int, AdapterState, int]]()  # the last: the step that it came before
        self._decoding = list[tuple[int, int]]()  # (number of the step with its last token, request)
        self._prompts = list[int]()
        self.batch = dict[int, AdapterState]()
        self._number, self._clock_s = 0, 0.0

    @property
    def load(self) -> int:
        """Return the number of its requests."""
        return len(self._entering) + len(self._waiting) + len(self.batch)

    @property
    def begins_s(self) -> float:
        """Return when its next step begins; infinity where it has no request."""
        if self.batch or self._waiting:
            return self._clock_s
        return max(self._clock_s, self._entering[0][0]) if self._entering else math.inf

    def enter(self, request: int, state: AdapterState, at_s: float) -> None:
        """Have a request wait from `at_s` on."""
        heappush(self._entering, (at_s, request, state))

    def step(self) -> None:
        """Take one step, which begins at `begins_s`."""
        now_s = self.begins_s
        while self._entering and self._entering[0][0] <= now_s:
            _, request, state = heappop(self._entering)
            self._waiting.append((request, state, self._number))
        decoding = len(self._decoding)
        budget = self._steps.max_tokens - decoding  # never below 0: each began to decode with a token that was left
        computed = self._go_on(budget)
        joined, cold = self._join(budget - computed, now_s)
        adapters = len({state.adapter for state in self.batch.values()})
        duration_s = self._steps.step_s(decoding, computed + joined, adapters) + cold * self._steps.load_s
        self._number, self._clock_s = self._number + 1, now_s + duration_s
        self._end()

    def _go_on(self, budget: int) -> int:
        """Compute a chunk of each prompt under way; returns the tokens."""
        before = budget
        for request in self._prompts:
            budget -= self._chunk(request, budget)
        return before - budget

    def _chunk(self, request: int, budget: int) -> int:
        taken = min(self._calls.prompt_left[request], budget)
        self._calls.prompt_left[request] -= taken
        return taken

    def _join(self, budget: int, now_s: float) -> tuple[int, int]:
        """Let requests join that wait; returns (tokens of their prompts, adapters that are loaded for them)."""
        before, cold, left = budget, 0, list[tuple[int, AdapterState, int]]()
        moments, waiting = self._calls.moments, iter(self._waiting)
        for request, state, came in waiting:
            is_open = budget and len(self.batch) < self._steps.max_seqs
            resident = self._place(state) if is_open else None
            if resident is None:
                left.append((request, state, came))
                if is_open:
                    continue
                break
            cold += not resident
            budget -= self._chunk(request, budget)
            self.batch[request] = state
            self._prompts.append(request)
            moments.admit[request], moments.immediate[request] = now_s, came == self._number
        self._waiting = [*left, *waiting]
        return before - budget, cold

    def _place(self, state: AdapterState) -> bool | None:
        """Return whether the adapter is in a slot, and take one if it is not; None where there is none."""
        return True if self._released else state.hold()

    def _end(self) -> None:
        """Hand out the tokens of the step that has ended."""
        calls, moments, under_way = self._calls, self._calls.moments, list[int]()
        for request in self._prompts:
            if calls.prompt_left[request]:
                under_way.append(request)
                continue
            moments.first[request] = self._clock_s
            heappush(self._decoding, (self._number + calls.tokens[request] - 1, request))
        self._prompts, freed = under_way, False
        while self._decoding and self._decoding[0][0] <= self._number:
            request = heappop(self._decoding)[1]
            moments.finish[request] = self._clock_s
            self.batch.pop(request).release()
            freed = True
        if freed and self._released:
            self._released(self._clock_s)


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
    return SimulationResult.of(requests, moments)


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
