"""`provision compare` as JSON, a plot and a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from provisioning.plan.fronts import Point, merge_cost
from provisioning.report import words
from provisioning.report.charts import drawn
from provisioning.report.glossary import POINTER
from provisioning.report.html import page, picture, table

NOTES = (
    "By the model alone: `provision` simulates the plan that you choose.",
    "Nothing is charged for what the GPUs of one instance exchange, so large instances look better than they are.",
    "8-bit wire: half the bytes on the links. Hot-merged: an instance of its own per merged adapter, at least. Merged "
    "base: `lora-server merge`, the hottest adapter in the base weights of every instance.",
    POINTER,
)
HEADINGS = ("way to serve", "requests/s", "GPUs", "requests an instance", "instances x GPUs, server and slots")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`fronts[line][i]` is what rates[i] costs; `asked` is the place of the rate that was asked for."""

    question: str
    command: str
    date: str
    rates: tuple[float, ...]
    asked: int
    fronts: dict[str, list[Point | None]]
    hottest: float  # share of the hottest adapter of the requests in flight
    budget: int | None = None
    within: dict[str, Point | None] | None = None
    price_per_gpu_hour: float | None = None

    @property
    def answer(self) -> str:
        """One line."""
        if self.within is not None:
            most = [(point.rate, line) for line, point in self.within.items() if point]
            if not most:
                return f"Nothing serves this on {self.budget:,} GPUs."
            fastest, line = max(most)
            return f"Most requests/s on {self.budget:,} GPUs: {line}, {words.number(fastest)}."
        costs = {line: points[self.asked] for line, points in self.fronts.items()}
        known = {line: point.gpus for line, point in costs.items() if point}
        if not known:
            return f"Nothing serves {words.number(self.rates[self.asked])} requests/s within these SLOs and limits."
        least = min(known.values())
        lines = " and ".join(line for line, gpus in known.items() if gpus == least)
        price = self.price_per_gpu_hour
        cost = "" if price is None else f", {words.number(least * price)} per hour"
        gpus, rate = words.count(least, "GPU"), words.number(self.rates[self.asked])
        return f"Cheapest for {rate} requests/s: {lines}, {gpus}{cost}."

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on all lines, and whether the hottest adapter pays in the base weights of every instance."""
        cost, (saves, costs) = merge_cost(self.hottest), ("saves", "costs")
        merge = (
            f"Merged base {saves if cost.compute < 1 else costs} compute and {saves if cost.wire < 1 else costs} wire "
            f"here: with {self.hottest:.0%} of the requests for the hottest adapter, the server computes "
            f"{cost.compute:.2f} of the entries (two per row of another adapter; it breaks even at 50 %), and the "
            f"links carry {cost.wire:.2f} of the bytes (such a row travels once; it breaks even at 0 %). Rows of the "
            "base model, which are not counted, would need the server, too: then compute breaks even where the hottest "
            "adapter has half of all rows, and the wire where it has as many rows as the base model."
        )
        return (*NOTES[:-1], merge, NOTES[-1])

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {"answer": self.answer, **asdict(self), "notes": list(self.notes)}


def rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Build a row per rate: the GPUs of every line."""
    for place, rate in enumerate(found.rates):
        points = (line[place] for line in found.fronts.values())
        yield words.number(rate), *("-" if point is None else f"{point.gpus:,}" for point in points)


def chosen(found: Comparison) -> Iterator[tuple[str, str, str, str, str]]:
    """Build a row per line: GPUs for the given rate, or the rate within the budget."""
    points = found.within or {line: front[found.asked] for line, front in found.fronts.items()}
    for line, point in points.items():
        if point is None:
            yield line, "-", "-", "-", "none within the limits"
        else:
            yield line, words.number(point.rate), f"{point.gpus:,}", words.number(point.batch, 3), point.how


def plot(found: Comparison, kind: str) -> bytes:
    """Plot GPUs over rate, one line per system; `kind` is svg or png."""

    def draw(axes: Any) -> None:
        styles = ("o-", "s-", "^--", "d:", "v-.")
        for (line, points), style in zip(found.fronts.items(), styles, strict=False):
            known = [point for point in points if point]
            axes.plot([p.rate for p in known], [p.gpus for p in known], style, ms=5, lw=1.5, alpha=0.85, label=line)
        axes.axvline(found.rates[found.asked], color="grey", linestyle=":", label="asked for")
        if found.budget:
            axes.axhline(found.budget, color="black", linewidth=0.7, label=f"{found.budget:,} GPUs")
        axes.set_xscale("log", base=2)
        axes.set_xticks(found.rates[::2], [words.number(rate, 3) for rate in found.rates[::2]])
        axes.set(xlabel="requests/s", ylabel="GPUs in all", ylim=(0, None))

    return drawn(draw, kind, 3.6)


def html(found: Comparison) -> str:
    """Render the comparison as an HTML page."""
    lines: Sequence[str] = tuple(found.fronts)
    body = [
        f'<p class="note">{escape(found.question)}</p>',
        f"<h1>{escape(found.answer)}</h1>",
        f'<p class="note"><code>{escape(found.command)}</code> {escape(found.date)}</p>',
        picture("GPUs over requests/s", plot(found, "png")),
        "<h2>GPUs in all</h2>",
        table(("requests/s", *lines), rows(found)),
        "<h2>What they are</h2>",
        table(HEADINGS, chosen(found)),
        *(f'<p class="note">{escape(note)}</p>' for note in found.notes),
    ]
    return page(f"{found.answer} {found.question}", body)
