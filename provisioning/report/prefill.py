"""What of the instances' time prompts take: estimated and said, since no SLO here has it in it."""

from __future__ import annotations

from provisioning.model.prefill import prefill_us
from provisioning.plan.question import Scenario
from provisioning.report import words
from provisioning.report.result import Result


def share(result: Result) -> str:
    """In a sentence, of both sides."""
    scenario, coupled = result.scenario, result.coupled
    tokens, source = _prompt_tokens(scenario)
    each_us = prefill_us(scenario.model, tokens)
    busy_us = scenario.rate(result.candidate.mean_step_us) * 1e-6 * each_us
    ours, theirs = busy_us / scenario.instances, busy_us / coupled.instances
    return (
        f"Prefill, estimated: {tokens:,.0f} prompt tokens a request ({source}) take {words.time(each_us)}, "
        f"{ours:.1%} of an instance's time; coupled, {theirs:.1%}."
    )


def _prompt_tokens(scenario: Scenario) -> tuple[float, str]:
    """Of a request on average, and by what: the context's mean has half of the output in it."""
    trace = scenario.workload.trace
    if trace is not None and trace.input_tokens is not None:
        return float(trace.input_tokens.mean()), "the trace's"
    return max(scenario.model.context_tokens - scenario.workload.lengths.mean_tokens / 2, 1.0), "by --context-tokens"
