"""A comparison as one HTML file: no script, nothing fetched from anywhere, readable on a phone.

Every text is escaped. The page's own policy forbids scripts and requests, should an escape be missing.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence

from gpt2_fp8.config.shown import harmless, line
from gpt2_fp8.measure.table import Row
from gpt2_fp8.reports import checklist
from gpt2_fp8.reports.sections import Section

_LONGEST = 1_000  # characters of a cell or a sentence
_ANSWERS = {checklist.HOLDS: "holds", checklist.FAILS: "fails", checklist.UNKNOWN: "unknown"}
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #8886; vertical-align: top; }
td { font-variant-numeric: tabular-nums; }
img { width: 100%; min-width: 40rem; background: #fff; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; padding: .6rem; margin: .3rem 0; }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
.holds { color: #1a7f37; } .fails { color: #cf222e; } .unknown { color: #9a6700; }
@media (prefers-color-scheme: dark) {
  .holds { color: #3fb950; } .fails { color: #ff7b72; } .unknown { color: #d29922; }
}
"""


def page(sections: Sequence[Section], picture: bytes | None) -> str:
    """Return the page. `picture`: a PNG, shown after the first section, or None."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Comparison of runs</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>Comparison of runs</h1>",
    ]
    for place, section in enumerate(sections):
        parts += _section(section)
        if place == 0 and picture is not None:
            data = base64.b64encode(picture).decode("ascii")
            parts.append(
                f'<div class="wide"><img alt="losses, speed, gradient norms" src="data:image/png;base64,{data}"></div>'
            )
    return "\n".join([*parts, "</body>\n</html>\n"])


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{_escaped(section.title)}</h2>"
    if len(section.sentences) > 1:
        yield "<ul>" + "".join(f"<li>{_escaped(sentence)}</li>" for sentence in section.sentences) + "</ul>"
    else:
        yield from (f"<p>{_escaped(sentence)}</p>" for sentence in section.sentences)
    if section.rows:
        yield from _table(section.rows)
    if section.texts:
        yield '<div class="texts">'
        for title, text in section.texts:
            yield f"<div><strong>{_escaped(title)}</strong><pre>{html.escape(harmless(text))}</pre></div>"
        yield "</div>"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    titles = [
        title for title in dict.fromkeys(key for row in rows for key in row) if any(row.get(title) for row in rows)
    ]
    yield '<div class="wide"><table>'
    yield "<tr>" + "".join(f'<th scope="col">{_escaped(title)}</th>' for title in titles) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(_cell(str(row.get(title) or "")) for title in titles) + "</tr>"
    yield "</table></div>"


def _cell(text: str) -> str:
    name = _ANSWERS.get(text)
    return f'<td class="{name}">{_escaped(text)}</td>' if name else f"<td>{_escaped(text)}</td>"


def _escaped(text: str) -> str:
    return html.escape(line(text, _LONGEST))
