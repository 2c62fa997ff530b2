"""`--report`: one HTML file with everything in it; it refers to nothing outside."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

from provisioning.report.charts import CHARTS, png
from provisioning.report.provenance import provenance
from provisioning.report.render import headline, rows, sizing
from provisioning.report.result import NOTES, Result

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}img{max-width:100%}.note{color:#666}"""


def html(result: Result) -> str:
    """The report as text."""
    coupled = result.as_json()["coupled"]
    body = [
        f"<h1>{escape(headline(result))}</h1>",
        _table(("", "plan", "limit"), rows(result)),
        *(f"<p>{escape(line)}</p>" for line in sizing(result)),
        f"<p>{escape(coupled['verdict'])}</p>",
    ]
    for title, draw in CHARTS:
        data = base64.b64encode(png(draw, result)).decode()
        body.append(f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{data}">')
    body += [
        "<h2>If the question changes</h2>",
        _table(
            ("if", "GPUs", "layout", "IAR of this layout", "meets, by the model"),
            (
                (v.change, str(v.gpus or "-"), v.layout or "-", f"{v.iar_at_plan:.4f}", _met(v.meets_at_plan))
                for v in result.variants
            ),
        ),
        "<h2>Where the numbers come from</h2>",
        _table(
            ("number", "value", "unit", "kind", "source"),
            (
                (name, f"{entry.value:.6g}", entry.unit, entry.kind, entry.source)
                for name, entry in provenance(result.scenario, result.candidate).items()
            ),
        ),
        *(f'<p class="note">{escape(note)}</p>' for note in NOTES),
    ]
    head = f'<meta charset="utf-8"><title>LoRA Server plan</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _met(met: bool) -> str:
    return "yes" if met else "no"


def _table(header: Iterable[str], lines: Iterable[tuple[str, ...]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{cells}</tr>{body}</table>"
