"""The `provision` command."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lora_server import spec

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Plan the GPUs of a LoRA server.")


@app.callback()
def root() -> None:
    """Plan the GPUs of a LoRA server."""


@app.command()
def models(
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank that the adapter sizes are given for.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """The model presets: geometry, and the bytes of an adapter on all experts (2-byte elements)."""
    rows = [
        {
            "name": preset.name,
            "layers": preset.layers,
            "experts": preset.experts,
            "top_k": preset.top_k,
            "hidden": preset.hidden,
            "ffn": preset.ffn,
            "bytes": preset.adapter_bytes(lora_rank),
            "bytes_shared_a": preset.adapter_bytes(lora_rank, shared_a=True),
            "assumed": list(preset.assumed),
        }
        for preset in spec.PRESETS.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Model presets, adapter sizes at rank {lora_rank}")
    for column in ("model", "layers", "experts", "top-k", "hidden", "ffn", "GiB, own A", "GiB, shared A", "assumed"):
        table.add_column(column, justify="left" if column in ("model", "assumed") else "right")
    for row in rows:
        sizes = (f"{row['bytes'] / 2**30:.2f}", f"{row['bytes_shared_a'] / 2**30:.2f}")
        geometry = (str(row[key]) for key in ("layers", "experts", "top_k", "hidden", "ffn"))
        table.add_row(str(row["name"]), *geometry, *sizes, ", ".join(row["assumed"]))
    Console().print(table)


def main() -> None:
    """Console script."""
    app()
