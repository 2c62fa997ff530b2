"""A plan with everything that is said about it: what the terminal, JSON, YAML and the report are made from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from provisioning.inputs import InputError
from provisioning.plan import coupled as coupling
from provisioning.plan.band import Band, band
from provisioning.plan.candidates import Candidate
from provisioning.plan.choice import smallest
from provisioning.plan.coupled import Coupled
from provisioning.plan.instances import sized
from provisioning.plan.judge import silent
from provisioning.plan.question import Scenario
from provisioning.plan.sensitivity import QuestionVariant, headroom, sensitivity
from provisioning.plan.verify import Verified, verify
from provisioning.report import words
from provisioning.report.glossary import POINTER

HOURS_PER_MONTH = 730
MOST_SIMULATED = 100_000
FEW_REQUESTS = 1000

_TTFT = "TTFT is queueing plus the first decode step, as in the paper; a request's own prefill is not in it."
_STEPPED = "TTFT includes the prompt, and TPOT is simulated: engines schedule as vLLM does, by --engine-profile."
_NOTES = (
    "GPUs are the LoRA Server's (ep * pp); those of the LLM instances come on top.",
    "One adapter cache serves all instances; a cold adapter is loaded layer by layer, no prefetch signal assumed.",
    POINTER,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Answer of `provision`. `asked` is the question, and `scenario` the same at the load that the plan has."""

    asked: Scenario
    verified: Verified
    coupled: Coupled
    variants: list[QuestionVariant]
    band: Band | None = None
    price_per_gpu_hour: float | None = None
    base_model: str = ""
    command: str = ""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def feasible(self) -> bool:
        """Exit code 0, else 3."""
        return self.verified.choice.feasible

    @property
    def candidate(self) -> Candidate:
        """The plan, or what came closest."""
        return self.verified.choice.chosen or self.verified.choice.closest

    @property
    def scenario(self) -> Scenario:
        """The question, its load settled by the plan's step."""
        return self.candidate.scenario

    @property
    def rate(self) -> float:
        """Requests/s that the plan serves, the mean over time."""
        return self.scenario.rate(self.candidate.mean_step_us) / self.scenario.workload.peak

    @property
    def headroom(self) -> float | None:
        """Headroom by the model; None without a plan, and where the model refuses the simulated one."""
        known = self.feasible and not self.verified.below_model
        return headroom(self.asked, self.candidate) if known else None

    @property
    def nodes(self) -> int:
        """Nodes of the LoRA Server and its spare GPUs."""
        gpus = self.candidate.gpus + self.candidate.spare_gpus
        return max(math.ceil(gpus / self.scenario.model.cluster.gpus_per_node), self.serving_nodes)

    @property
    def serving_nodes(self) -> int:
        """Nodes of the LoRA Server alone, for `lora-server serve --nodes`; each replica has its own."""
        of_each = math.ceil(self.candidate.gpus / self.scenario.model.cluster.gpus_per_node)
        return of_each * self.scenario.replicas

    @property
    def worth_it(self) -> bool:
        """Whether a LoRA Server does what coupled instances on as many GPUs do not."""
        return self.feasible and not self.coupled.holds

    @property
    def worth(self) -> str:
        """State the verdict in a sentence, with the reason."""
        return coupling.worth(self.candidate, self.coupled, plan=self.feasible)

    @property
    def notes(self) -> tuple[str, ...]:
        """List what holds for every figure."""
        return (_TTFT if self.asked.engine_profile is None else _STEPPED, *_NOTES)

    @property
    def warnings(self) -> list[str]:
        """List the caveats of this answer."""
        trace = self.scenario.workload.trace
        if trace is None or len(trace) >= FEW_REQUESTS:
            return []
        seen = words.count(len(trace), "request")
        return [f"the trace has {seen}, too few to bear a plan out; give {FEW_REQUESTS:,} or more"]

    def cost(self) -> dict[str, float] | None:
        """Compute costs from --price-per-gpu-hour; tokens at LB in flight and the modelled step."""
        if self.price_per_gpu_hour is None or not self.feasible:
            return None
        scenario, price, coupled = self.scenario, self.price_per_gpu_hour, self.coupled
        engines = scenario.engine_gpus
        server = self.candidate.all_gpus - engines
        hourly = self.candidate.all_gpus * price
        tokens_per_hour = self.rate * scenario.workload.lengths.mean_tokens * 3600
        rival = {} if coupled.gpus_needed is None else {"coupled_per_hour": coupled.gpus_needed * price}
        return {
            "price_per_gpu_hour": price,
            "lora_server_per_hour": server * price,
            "engines_per_hour": engines * price,
            "total_per_hour": hourly,
            "total_per_month": hourly * HOURS_PER_MONTH,
            "total_per_million_tokens": hourly / tokens_per_hour * 1e6,
            "lora_server_per_adapter_month": server * price * HOURS_PER_MONTH / scenario.workload.num_adapters,
            **rival,
        }


def answer(
    scenario: Scenario,
    *,
    seeds: int,
    price_per_gpu_hour: float | None = None,
    base_model: str = "",
    command: str = "",
    say: Callable[[str], None] = silent,
) -> Result:
    """Plan, simulate (unless seeds is 0), compare with coupled and vary the question; `say` hears of progress."""
    say("modelling")
    scenario = sized(scenario)
    choice = smallest(scenario)
    in_flight = choice.closest.scenario.global_batch
    if seeds and in_flight > MOST_SIMULATED:
        raise InputError(
            f"--no-simulate: {words.number(in_flight)} requests in flight are too many to simulate "
            f"(at most {MOST_SIMULATED:,}); add --no-simulate"
        )
    verified = verify(scenario, choice, seeds, say) if seeds else Verified(choice=choice, verdict=None)
    candidate = verified.choice.chosen or verified.choice.closest
    say("the band")
    return Result(
        asked=scenario,
        verified=verified,
        coupled=coupling.compare(scenario, candidate, seeds if verified.choice.feasible else 0, say),
        variants=sensitivity(scenario, candidate, feasible=verified.choice.feasible),
        band=band(candidate, simulated=bool(seeds)) if verified.choice.feasible else None,
        price_per_gpu_hour=price_per_gpu_hour,
        base_model=base_model or scenario.model.spec.name,
        command=command,
    )
