"""Terminal output of `provision watch`."""

from __future__ import annotations

from typing import Any

from provisioning.report import screen, words
from provisioning.report.glossary import POINTER

_NAMED = 10  # adapters on the screen


def print_watch(found: dict[str, Any]) -> None:
    """Print measured beside planned, the GPUs, and the advice."""
    on = screen.console()
    over = "since the server's start" if found["seconds"] is None else f"over {words.moment(found['seconds'])}"
    on.print(f"{words.number(found['requests'])} requests ended, {over}, in {words.count(found['scrapes'], 'scrape')}.")
    if found["restarts"]:
        warning = "Warning: the server restarted between two scrapes; its counts since the previous one are lost."
        on.print(warning, style="bold yellow")
    columns = ("measured", "planned", "measured/planned")
    rows = screen.table("", *columns, numbers=columns)
    for row in found["measured"]:
        texts = (_number(row[name], row["unit"]) for name in ("measured", "planned"))
        rows.add_row(row["what"], *texts, "-" if row["factor"] is None else words.number(row["factor"], 3))
    on.print(rows)
    if found["most_called"]:
        named = (f"{one['adapter']} {one['requests']:,.0f}" for one in found["most_called"])
        on.print(f"Called most: {', '.join(named)}.")
    if found["now"]:
        _print_gpus(found, on)
    if found["next_hour"]:
        one = found["next_hour"]
        first, more = one["preload"][:_NAMED], len(one["preload"]) - _NAMED
        on.print(
            f"At {one['hour']:02}:00 UTC there were {words.number(one['request_rate'])} requests/s on average, "
            f"{words.number(one['in_flight'])} in flight; load before it: {', '.join(first)}"
            f"{f' and {more:,} more (--json)' if more > 0 else ''}."
        )
    on.print(found["advice"], style="bold")
    on.print(POINTER)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit:
        return words.time(value * (1e6 if unit == "s" else 1))
    return words.number(value)


def _print_gpus(found: dict[str, Any], on: Any) -> None:
    numbers = ("requests/s", "in flight", "GPUs", "in all", "coupled", "M*")
    rows = screen.table(
        "GPUs for", "requests/s", "in flight", "GPUs", "layout", "in all", "coupled", "M*", "binding", numbers=numbers
    )

    def add(what: str, rate: float | None, in_flight: float | None, one: dict[str, Any]) -> None:
        load = ("" if value is None else words.number(value) for value in (rate, in_flight))
        gpus, every, coupled = (
            "-" if one[key] is None else f"{one[key]:,}" for key in ("gpus", "all_gpus", "coupled_gpus")
        )
        rows.add_row(
            what, *load, gpus, one["layout"] or "-", every, coupled, f"{one['min_cache_slots']:,}", one["binding"]
        )

    by_name = {row["what"]: row["measured"] for row in found["measured"]}
    add("all scrapes, simulated", by_name["requests/s"], by_name["requests in flight"], found["now"])
    if found["corrected"]:
        factor = words.number(found["corrected"]["compute_factor"], 3)
        add(f"compute x{factor}, model", None, None, found["corrected"])
    for one in found["by_hour"]:
        add(f"{one['hour']:02}:00 UTC, model", one["request_rate"], one["in_flight"], one)
    on.print()
    on.print(rows)
