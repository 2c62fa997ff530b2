"""The result of a run: its cells, as JSON, and as plain text that reads as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def by_peer(model: str, tokens: int, sites: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """us of each peer over the sites; only of those that were right at every site."""
    totals: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.get("model") == model and line.get("tokens") == tokens and "us" in line:
            totals.setdefault(line["peer"], {})[line["site"]] = line["us"]
    return {peer: sum(us.values()) for peer, us in totals.items() if set(us) == set(sites)}


def cells(sites: Sequence[Mapping[str, Any]], peer_lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One cell per model and number of tokens, over its sites. Without a peer that ran, its two fields are null."""
    found = []
    for model, tokens in dict.fromkeys((site["model"], site["tokens"]) for site in sites):
        mine = [site for site in sites if (site["model"], site["tokens"]) == (model, tokens)]
        us = sum(site["us"] for site in mine)
        peers = by_peer(model, tokens, [site["site"] for site in mine], peer_lines)
        fastest = min(peers, key=lambda peer: peers[peer], default=None)
        found.append(
            {
                "model": model,
                "tokens": tokens,
                "floor_ratio": sum(site["floor_us"] for site in mine) / us,
                "peer_ratio": None if fastest is None else peers[fastest] / us,
                "fastest_peer": fastest,
                "max_rel_err": max(site["max_rel_err"] for site in mine),
            }
        )
    return found


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a Markdown table with aligned columns."""
    body = [[f"{value:.3g}" if isinstance(value, float) and abs(value) < 1 else
             f"{value:.1f}" if isinstance(value, float) else "-" if value is None else str(value) for value in row]
            for row in rows]  # fmt: skip
    widths = [max([len(column), *(len(row[i]) for row in body)]) for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *body]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


CELL = ("model", "tokens", "floor_ratio", "peer_ratio", "fastest_peer", "max_rel_err")
SITE = ("model", "tokens", "site", "us", "with_routing_us", "floor_us", "floor_ratio", "distinct_mb", "distinct_gbps")
PEER = ("model", "tokens", "site", "peer", "us", "with_routing_us", "max_rel_err", "option")
ROOFLINE = ("model", "tokens", "site", "distinct_pairs", "rows_per_segment", "weights_mb", "shrink_us", "expand_us",
            "floor_us", "ours_mb", "workspace_mb", "tiles", "ratio_workspace_in_memory",
            "ratio_workspace_in_l2")  # fmt: skip
BALANCE = ("model", "tokens", "site", "phase", "bytes_us", "equal_us", "weighed_us")


def picked(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a table of these columns of the rows."""
    return text_table(columns, [[row.get(column) for column in columns] for row in rows])


def text(result: Mapping[str, Any]) -> str:
    hardware = ", ".join(f"{key} {value}" for key, value in result["hardware"].items())
    errors = [f"- {line['peer']} at {line['model']} {line['site']}: {line['error']}"
              for line in result["peers"] if "error" in line]  # fmt: skip
    return "\n".join(
        [
            "# Multi-LoRA kernels", "", f"`{result['command']}`", "", hardware, "",
            f"Read bandwidth measured in this run: {result['read_gbps']:.0f} GB/s. A graph-replayed step with one",
            f"rank-16 segment: {result['overhead_us']:.1f} us ({result['overhead_in_sequence_us']:.1f} us as one of"
            f" many in a graph; an empty graph: {result['empty_us']:.1f} us).", "",
            "## Cells (gate_up and down together, routing left out)", "", picked(CELL, result["cells"]), "",
            "## Sites", "", picked(SITE, result["sites"]), "",
            "## Peers (the fastest option of each)", "",
            picked(PEER, [line for line in result["peers"] if "us" in line]), "",
            *(["Not measured:", "", *errors, ""] if errors else []),
        ]
    )  # fmt: skip
