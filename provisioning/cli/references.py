"""References that `provision` plans with: `provision glossary`, `provision models`, `provision table4`."""

from __future__ import annotations

from typing import Annotated

import typer

from lora_server import spec
from provisioning.cli.console import Json, say_json


def glossary(as_json: Json = False) -> None:
    """The words of a plan: immediate admission, M*, Eq. 5, visible load and others."""
    from provisioning.report import screen
    from provisioning.report.glossary import TERMS

    if as_json:
        say_json(TERMS)
        return
    screen.console().print(screen.table("word", "means", rows=TERMS.items()))


def table4(as_json: Json = False) -> None:
    """The latency model beside the paper's Table 4, with residuals; * is what it was fitted to."""
    from provisioning.model import table4 as table

    if as_json:
        say_json(table.as_json())
        return
    from provisioning.report import screen

    cells = table.residuals()
    shown = screen.table("layout", "batch", *table.COLUMNS, numbers=("batch",))
    for layout, batch in table.PAPER:
        row = [cell for cell in cells if (cell.layout, cell.batch) == (layout, batch)]
        texts = (f"{c.paper_us:.0f}/{c.model_us:.0f} {c.relative:+.1%}{'*' if c.in_sample else ''}" for c in row)
        shown.add_row(layout, str(batch), *texts)
    on = screen.console()
    on.print("Microseconds a layer: paper/model, and how far off the model is; * is what it was fitted to.")
    on.print(shown)


def models(
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank that the adapter sizes are given for.")] = 64,
    as_json: Json = False,
) -> None:
    """The model presets: geometry, and the bytes of an adapter on all experts (2-byte elements)."""
    if as_json:
        say_json([_row(preset, lora_rank) for preset in spec.PRESETS.values()])
        return
    from provisioning.report import screen

    columns = ("layers", "experts", "top-k", "hidden", "ffn", "own A", "shared A")
    table = screen.table("model", *columns, numbers=columns)
    for preset in spec.PRESETS.values():
        sizes = (preset.adapter_bytes(lora_rank), preset.adapter_bytes(lora_rank, shared_a=True))
        geometry = (preset.layers, preset.experts, preset.top_k, preset.hidden, preset.ffn)
        table.add_row(
            preset.name, *(f"{width:,}" for width in geometry), *(f"{size / 2**30:,.2f} GiB" for size in sizes)
        )
    on = screen.console()
    on.print(table)
    on.print(f"The last two are an adapter of rank {lora_rank:,}: gate and up have an A each, or share one.")
    for preset in spec.PRESETS.values():
        if preset.assumed:
            on.print(f"Assumed of {preset.name}: {', '.join(preset.assumed)}.")


def _row(preset: spec.ModelSpec, lora_rank: int) -> dict[str, object]:
    return {
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
