"""Systems that are simulated step by step, where the question has an engine profile (`--engine-profile`).

The engines schedule as vLLM does, with the steps that were measured: those beside a LoRA server whatever its layout,
which the model judges, and vLLM's own LoRA with the number of slots that is nearest. TTFT then includes the prompt, and
the mean TPOT is judged, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from provisioning.arrays import Ints
from provisioning.inputs import InputError
from provisioning.model.engine_steps import EngineProfile, Kind
from provisioning.plan.question import Scenario
from provisioning.simulation.run import SimulationResult, System, run
from provisioning.simulation.steps import MOST_ENGINES, StepSystem, run_steps
from provisioning.workload.requests import Requests


def stepped(
    profile: EngineProfile, kind: Kind, *, slots: int, instances: int, most_requests: int, load_s: float = 0.0
) -> StepSystem:
    """Make a system of so many engines, each with KV cache for `most_requests`."""
    if instances > MOST_ENGINES:
        raise InputError(
            f"--engine-profile: {instances:,} instances are too many to simulate step by step "
            f"(at most {MOST_ENGINES}); leave it out"
        )
    steps = profile.steps(kind, slots)
    return StepSystem(
        steps=replace(steps, max_seqs=max(min(steps.max_seqs, most_requests), 1)),
        slots=slots,
        shared=kind == "server",
        instances=instances,
        load_s=load_s,
    )


def simulated(scenario: Scenario, requests: Requests, system: System | StepSystem) -> SimulationResult:
    """Play the requests through either kind of system."""
    if isinstance(system, System):
        return run(requests, system)
    return run_steps(replace(requests, input_tokens=_prompts(scenario, requests)), system)


def _prompts(scenario: Scenario, requests: Requests) -> Ints:
    """Return the prompt tokens that engines compute; one where other instances do."""
    if scenario.prefill == "apart":
        return np.ones(len(requests), dtype=np.int64)
    tokens, given = np.full(len(requests), scenario.prompt_tokens), requests.input_tokens
    if given is not None and given.any():
        tokens *= given / given.mean()
    found: Ints = np.maximum(np.rint(tokens), 1).astype(np.int64)
    return found
