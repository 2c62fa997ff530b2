"""`lora-server profile-vllm`: measures vLLM's steps on this machine, for `provision simulate`."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server.cli.call import one_line_errors
from lora_server.cli.profile import numbers, write_measured
from lora_server.errors import ConfigError


@one_line_errors()
def profile_vllm(
    base_model: Annotated[Path, typer.Option(help="Model directory.")],
    adapters: Annotated[Path, typer.Option(help="Directory of PEFT adapters.")],
    out: Annotated[Path, typer.Option(help="File to write, for `provision simulate --engine-profile`.")],
    slots: Annotated[str, typer.Option(help="max_loras of vLLM's own LoRA, separated by commas; none: left out.")] = "",
    threads: Annotated[int, typer.Option(min=1, help="Threads of an engine; one fewer beside a LoRA server.")] = 2,
    engine_args: Annotated[str, typer.Option(help="vLLM's engine arguments, as JSON.")] = "{}",
    serve_args: Annotated[str, typer.Option(help="More flags of `lora-server serve`.")] = "--layout ep1-pp1",
) -> None:
    """Measure vLLM's steps, with and without a LoRA server.

    \b
    lora-server profile-vllm --base-model ./base --adapters ./adapters \\
        --slots 4,8 --engine-args '{"max_num_seqs": 32}' --out engine.json
    provision simulate --engine-profile engine.json --mode coupled \\
        --cache-slots 8 --adapters 64 --request-rate 3 --mean-output-tokens 32

    Run it in vLLM's environment, on a machine without other work. It takes a minute or two per way to serve:
    without adapters, beside a LoRA server, and vLLM's own LoRA with each number of slots.
    """
    from lora_server import installed

    installed.require("demo")
    from lora_server.demo.vllm_profile import EnginePlan, measure

    plan = EnginePlan(
        base_model=base_model,
        adapters=adapters,
        threads=threads,
        slots=numbers(slots, "--slots") if slots else (),
        engine_args=_object(engine_args),
        serve_args=tuple(shlex.split(serve_args)),
    )
    write_measured(out, partial(measure, plan))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine-args: got {text!r}, expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--engine-args: got {text!r}, expected a JSON object such as " + '{"max_num_seqs": 32}')
    return found
