"""`--emit DIR`: what would refute the plan. The load as a trace, and the commands of the servers that it is for."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator

from provisioning.plan.judge import played
from provisioning.report.render import headline, question
from provisioning.report.result import Result
from provisioning.report.serve_file import plan_yaml, server_flags

TRACE, COMMANDS, PLAN = "trace.csv", "commands.sh", "plan.yaml"


def files(result: Result) -> dict[str, str]:
    """Return the text of each file, by name."""
    return {TRACE: trace(result), COMMANDS: commands(result), PLAN: plan_yaml(result)}


def trace(result: Result) -> str:
    """Write the calls of the first simulated run at the planned load, as `provision --trace` reads them."""
    requests = played(result.scenario, result.candidate.mean_step_us, 0)
    workload, stream = result.scenario.workload, io.StringIO()
    outputs = requests.output_tokens
    given = max(round(result.scenario.prompt_tokens), 1)  # a request's on average
    inputs = [given] * len(requests) if requests.input_tokens is None else requests.input_tokens.tolist()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(("timestamp", "adapter", "input_tokens", "output_tokens"))
    names = [workload.name(index) for index in range(workload.num_adapters)]
    for at, adapter, asked, written in zip(requests.arrival_s, requests.adapter, inputs, outputs, strict=True):
        rows.writerow((f"{at:.6f}", names[adapter], asked, written))
    return stream.getvalue()


def commands(result: Result) -> str:
    """Write the commands for a server with the plan and its vLLM instances, each of which is sent an equal share."""
    return "".join(f"{line}\n" for line in _commands(result))


def _commands(result: Result) -> Iterator[str]:
    scenario, model = result.scenario, shlex.quote(result.base_model)
    gpus, first = scenario.model.instance_gpus, result.candidate.gpus
    split = scenario.model.spec.moe_layers and not scenario.model.tensor_parallel
    experts = " --enable-expert-parallel" if split else ""
    one_host = scenario.replicas == 1 and first + scenario.instances * gpus <= scenario.model.cluster.gpus_per_node
    yield f"# {question(result)}"
    yield f"# {headline(result)}"
    yield f"# {TRACE}: arrivals in s, adapters, tokens; send each request to any instance, `model` being its adapter."
    yield f"# The adapters of {TRACE} are sub-directories of ./adapters. What is measured is `immediate` of"
    yield "# lora_server_admissions_total against all of them, beside the plan's target."
    flags = f" {server_flags(result)}".rstrip()
    yield f"lora-server serve --config {PLAN} --base-model {model} --adapters ./adapters{flags}"
    yield "export LORA_SERVER_ADDRESS=127.0.0.1:7400  # the server's, on every host"
    yield f"export LORA_SERVER_TRANSPORT={scenario.model.transport.name}"
    if not one_host:
        yield "# All do not fit on one host: start each of these where GPUs are free."
    for instance in range(scenario.instances):
        own = range(first + instance * gpus, first + (instance + 1) * gpus)
        local = f"CUDA_VISIBLE_DEVICES={','.join(map(str, own))} " if one_host else ""
        parallel = f" --tensor-parallel-size {gpus}{experts}" if gpus > 1 else ""
        yield f"{local}vllm serve {model} --served-model-name base --port {8000 + instance}{parallel}"
