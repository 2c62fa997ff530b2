"""`lora-server profile`: measures this machine for `provision`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lora_server.cli.call import one_line_errors
from lora_server.errors import ConfigError

OutOption = Annotated[Path, typer.Option(help="File to write, for `provision --profile`.")]
ModelOption = Annotated[
    Path | None, typer.Option(help="Model directory, mixture-of-experts. (default: a small Mixtral, made here)")
]


@one_line_errors()
def profile(
    out: OutOption,
    base_model: ModelOption = None,
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    ep: Annotated[str, typer.Option(help="Shards of a stage, separated by commas.")] = "1,2",
    batches: Annotated[str, typer.Option(help="Decode batches.")] = "4,8,16,32",
    prompts: Annotated[str, typer.Option(help="Tokens of a prompt chunk.")] = "32,128,256",
    engines: Annotated[int, typer.Option(min=1, help="Most engines that step at once.")] = 2,
    transport: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    wire: Annotated[str, typer.Option(help="The server's --wire.")] = "exact",
) -> None:
    """Measure this machine's CPUs for the planner.

    \b
    lora-server profile --ep 1 --engines 1 --out cpu.json
    provision --profile cpu.json --gpu cpu --transport shm --lora-rank 16 \\
        --model small-mixtral --adapters 200 --instances 2 --batch-size 8 \\
        --slo ttft_p95=2s,tpot_avg=500ms

    A server and engines run with adapters made for the model, one thread each; leave the machine to them. `provision`
    refuses the profile for another model, rank, wire, transport or machine.
    """
    from lora_server import installed

    installed.require("demo")
    from lora_server.demo.profile import ProfilePlan, measure

    plan = ProfilePlan(
        base_model=base_model,
        lora_rank=lora_rank,
        eps=numbers(ep, "--ep"),
        batches=numbers(batches, "--batches"),
        prompts=numbers(prompts, "--prompts"),
        engines=engines,
        transport=transport,
        wire=wire,
    )
    write_measured(out, partial(measure, plan))


def write_measured(out: Path, measure: Callable[[str, Callable[[str], None]], object]) -> None:
    """Write what `measure` finds, of the command that was typed and with a callback for progress, to `out` as JSON.

    Raises ConfigError, before minutes are spent, where that cannot be written. An older result stays until then.
    """
    from lora_server import terminal

    if not out.parent.is_dir():
        raise ConfigError(f"--out: no directory {out.parent}; create it first")
    is_new = not out.exists()
    try:
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}; give another file") from None
    if is_new:
        out.unlink()
    with terminal.progress(transient=True) as progress:
        task = progress.add_task("starting", total=None)
        asked = shlex.join(["lora-server", *sys.argv[1:]])
        found = measure(asked, lambda text: progress.update(task, description=text))
    out.write_text(json.dumps(found, indent=1) + "\n")
    typer.echo(f"out: {out}", err=True)


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the whole numbers above 0 of a list with commas, in order; raises ConfigError."""
    try:
        found = tuple(sorted({int(piece) for piece in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(f"{flag}: got {text!r}, expected whole numbers above 0, such as 1,2,4")
    return found
