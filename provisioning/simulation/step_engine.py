"""One engine that schedules as vLLM's does, step by step; `steps` states the rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from provisioning.model.engine_steps import EngineSteps
from provisioning.simulation.engine import Moments
from provisioning.simulation.state import AdapterState


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
