"""Reports as Markdown, aligned for a terminal too, as one HTML page, and as a picture (PNG, None without matplotlib).

Texts of a run's folder may be a stranger's: they are escaped here.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

from gpt2_fp8.config.shown import inert, line, table
from gpt2_fp8.reports.comparison import Comparison, mean_curve

Row = Mapping[str, str]
_MOST = 10  # conditions: the colours of one cycle
_POINTS = 200  # of a curve
# Of lines that coincide, the one below shows through the gaps of the next.
_DASHES: tuple[Any, ...] = ("-", (0, (6, 4)), (0, (2, 4)), (0, (6, 2, 1, 2)))
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .875rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid #8886; }
img { width: 100%; background: #fff; }
</style>
</head>
<body>
$body
</body>
</html>
""")


class Section(NamedTuple):
    """A part of a report."""

    title: str
    sentences: Sequence[str]
    rows: Sequence[Row] = ()


def markdown(title: str, sections: Sequence[Section], picture: str | None) -> str:
    """Return a report as Markdown. `picture`: the name of its file, or None."""
    parts = [f"# {title}"]
    for section in sections:
        mark = "- " if len(section.sentences) > 1 else ""
        told = "\n".join(f"{mark}{inert(sentence, 1000)}" for sentence in section.sentences)
        parts += [f"## {section.title}", told, table(section.rows)]
    parts += [f"![{title}]({picture})"] if picture else []
    return "\n\n".join(filter(None, parts)) + "\n"


def page(title: str, text: str, picture: bytes | None) -> str:
    """Return a report in Markdown as an HTML page without scripts. `picture`: a PNG, or None."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    if picture is not None:
        body += f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    return _PAGE.substitute(title=title, body=body)


def comparison(found: Comparison) -> bytes | None:
    """Draw training and validation loss, and how far the training loss is above the base's."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays
    except ImportError:
        return None
    figure = Figure(figsize=(15.0, 4.5), layout="constrained")
    training, distance, validation = axes = figure.subplots(1, 3)
    _, base, _ = mean_curve(found.base, found, _POINTS)
    for place, side in enumerate([side for side in found.sides if not side.why_not][:_MOST]):
        style = {"color": f"C{place}", "linestyle": _DASHES[place % len(_DASHES)], "zorder": 2 + place / 10}
        at, mean, deviation = mean_curve(side, found, _POINTS)
        bands = ((training, mean, deviation), (distance, 100 * (mean / base - 1), 100 * deviation / base))
        for each, middle, reach in bands:
            each.plot(at, middle, label=line(side.condition.name, 40), **style)
            each.fill_between(at, middle - reach, middle + reach, color=style["color"], alpha=0.2, linewidth=0)
        for run in side.runs:
            validation.plot(*run.curve.validations, marker="o", markersize=3, alpha=0.7, **style)
    training.set(title="training loss (bands: seeds' deviation)", ylabel="nats a token", xlabel="tokens")
    distance.set(title="training loss above the base's", ylabel="%", xlabel="tokens")
    validation.set(title="validation loss", ylabel="nats a token", xlabel="tokens")
    for each in axes:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    for label in training.legend(frameon=False, fontsize=8).get_texts():
        label.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have
        figure.savefig(buffer, dpi=120)
    return buffer.getvalue()
