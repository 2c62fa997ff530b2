"""`--report`: one HTML file that refers to nothing outside, for a desk or a phone, in the light or in the dark."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

from provisioning.report import words
from provisioning.report.charts import charts, png
from provisioning.report.provenance import PlanInput, provenance
from provisioning.report.render import changes, costs, headline, question, remarks, rows, sides, summary
from provisioning.report.result import Result
from provisioning.report.serve_file import unmet

_STYLE = """:root{color-scheme:light dark;--text:#222;--page:#fff;--line:#ddd;--quiet:#5a5a5a;--warn:#9a3b00}
@media(prefers-color-scheme:dark){:root{--text:#e6e6e6;--page:#16181c;--line:#3a3d44;--quiet:#a8abb2;--warn:#ffb27a}}
body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:1.5em auto;padding:0 1em;color:var(--text);
background:var(--page);overflow-wrap:break-word}
.wide{overflow-x:auto;margin:1em 0}table{border-collapse:collapse}
td,th{padding:.25em .8em .25em 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
h1{font-size:1.4em;line-height:1.3}h2{font-size:1.1em;margin-top:2em}
img{max-width:100%;height:auto;background:#fff;border-radius:6px}.note{color:var(--quiet)}.warning{color:var(--warn)}
.worth{font-weight:600}"""


def html(result: Result) -> str:
    """Render the report as the text of an HTML page."""
    body = [
        f'<p class="note">{escape(question(result))}</p>',
        f"<h1>{escape(headline(result))}</h1>",
        f'<p class="worth">{escape(result.worth)}</p>',
        *(f"<p>{escape(line)}</p>" for line in summary(result)),
        f'<p class="note"><code>{escape(result.command)}</code> {escape(result.date)}</p>',
        *(f'<p class="warning">Warning: {escape(line)}</p>' for line in result.warnings),
        table(("", "plan", "limit"), rows(result)),
        *(f"<p>{escape(line)}</p>" for line in remarks(result)),
        table(("", "with a LoRA Server", "coupled"), sides(result)),
    ]
    for title, draw in charts(result):
        body.append(picture(title, png(draw, result)))
    priced = list(costs(result))
    body += [
        "<h2>If the question changes</h2>",
        table(("if", "GPUs", "layout", "immediate admission of this layout", "meets, by the model"), changes(result)),
        *(["<h2>Cost</h2>", table(("cost", ""), priced)] if priced else []),
        "<h2>Where the numbers come from</h2>",
        table(
            ("number", "value", "kind", "source"),
            (
                (name.replace("_", " "), _value(entry), entry.kind, entry.source)
                for name, entry in provenance(result.scenario, result.candidate).items()
            ),
        ),
        *(f'<p class="note">{escape(note)}</p>' for note in (*result.notes, *unmet(result))),
    ]
    return page(f"{headline(result)}: {question(result)}", body)


def page(title: str, body: Iterable[str]) -> str:
    """Make a complete HTML document; `body` is HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def picture(title: str, png: bytes) -> str:
    """Make a plot under its title."""
    data = base64.b64encode(png).decode()
    return f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{data}">'


def _value(entry: PlanInput) -> str:
    return words.size(entry.value) if entry.unit == "bytes" else f"{words.number(entry.value)} {entry.unit}"


def table(header: Iterable[str], lines: Iterable[tuple[str, ...]]) -> str:
    """Make a table, which scrolls within itself if it is wider than the page."""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'
