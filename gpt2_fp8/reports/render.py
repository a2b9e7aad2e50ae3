"""A comparison as Markdown, aligned for a terminal too, as one HTML page, and as a picture where there is matplotlib.

Texts of a run's folder may be a stranger's: they are escaped here.
"""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config.shown import format_large, inert, line, table
from gpt2_fp8.reports.comparison import Comparison, Row, mean_curve

FILES = ("compare.md", "compare.html", "compare.png")
_TITLE = "Comparison of runs"
_SECTIONS = {  # by key: the title, and what is said of the figures
    "runs": ("Runs", "Compared with {base}, up to the {tokens:,.0f} tokens that all have."),
    "verdict": ("Verdict on FP8", "By the confidence interval of the difference in loss."),
    "losses": ("Losses", "Nats a token. The interval is Welch's, at 95 %; pairs are of equal seeds. A training loss is "
               "the mean of the last {width:,.0f} tokens."),
    "equal_loss": ("Time to equal loss", "When the mean curves of a condition and of the base first came down to the "
                   "higher of their two losses at the end. Errors are standard errors over seeds (jackknife). Energy "
                   "and cost are of one GPU."),
    "throughput": ("Throughput and memory", "Medians of a run's logged intervals, then means of the runs. Memory: the "
                   "peak."),
}  # fmt: skip
_FORMS = {key: form for form, keys in {
    ".4f": ("mean", "deviation", "level", "paired_error"), "+.4f": ("above_base", "paired"),
    "+.2%": ("relative", "relative_low", "relative_high"), ".0%": ("memory_of_base",),
    ".2f": ("times_base", "cost", "base_cost"), ",.0f": ("tokens", "base_tokens", "tokens_per_second"),
    ",.1f": ("seconds", "base_seconds", "memory_gb", "kilojoules", "base_kilojoules"),
    ".3f": ("tokens_ratio", "tokens_error", "seconds_ratio", "seconds_error"),
}.items() for key in keys}  # fmt: skip
_MOST = 10  # conditions: the colours of one cycle
_KEPT = ("condition", "loss")  # columns that each part of a wide table has
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


def write(folder: Path, found: Comparison, figures: dict[str, Any], widest: int | None = None) -> str:
    """Write the files into `folder`; return the Markdown, with tables of `widest` columns at most. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    text, picture = _markdown(found, figures), _draw(found)
    body, linked = MarkdownIt("commonmark", {"html": False}).enable("table").render(text), text
    if picture is not None:
        (folder / FILES[2]).write_bytes(picture)
        body += f'<img alt="{_TITLE}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        linked = f"{text}\n![{_TITLE}]({FILES[2]})\n"
    durable.write_text(folder / FILES[0], linked)
    durable.write_text(folder / FILES[1], _PAGE.substitute(title=_TITLE, body=body))
    return linked if widest is None else _markdown(found, figures, widest)


def _markdown(found: Comparison, figures: dict[str, Any], widest: int | None = None) -> str:
    of = {"base": found.base.condition.name, "tokens": found.tokens, "width": found.width}
    parts = [f"# {_TITLE}", inert(figures["result"], 1000)]
    for key, (title, about) in _SECTIONS.items():
        if figures[key]:
            parts += [f"## {title}", inert(about.format(**of), 1000)]
            rows = list(map(_format, figures[key]))
            parts.append(table(rows) if widest is None else _fit(rows, widest))
    if figures["notes"]:
        mark = "- " if len(figures["notes"]) > 1 else ""
        parts += ["## Notes", "\n".join(f"{mark}{inert(note, 1000)}" for note in figures["notes"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _fit(rows: list[Row], widest: int) -> str:
    """Return rows as one table below the other, of at most `widest` columns; a long cell loses its middle."""
    rows = [{title: _cut(cell, 26 if title in _KEPT else 64) for title, cell in row.items()} for row in rows]
    titles = list(dict.fromkeys(title for row in rows for title, cell in row.items() if cell))
    kept = [title for title in titles if title in _KEPT]

    def show(others: list[str]) -> str:
        return table([{title: row.get(title, "") for title in [*kept, *others]} for row in rows])

    parts: list[list[str]] = [[]]
    for title in titles[len(kept) :]:
        if parts[-1] and show([*parts[-1], title]).find("\n") > widest:
            parts.append([])
        parts[-1].append(title)
    return "\n\n".join(map(show, parts))


def _cut(cell: str, most: int) -> str:
    return cell if len(cell) <= most else f"{cell[: most - 13]}...{cell[-10:]}"


def _format(row: Row) -> Row:
    return {
        key.replace("_", " "): "" if cell is None else format(cell, _FORMS.get(key, "")) for key, cell in row.items()
    }


def _draw(found: Comparison) -> bytes | None:
    """Draw training and validation loss, and how far the training loss is above the base's, as a PNG."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays
    except ImportError:
        return None
    figure = Figure(figsize=(15.0, 4.5), layout="constrained")
    training, distance, validation = axes = figure.subplots(1, 3)
    _, base, _ = mean_curve(found.base, found, _POINTS)
    others = [side for side in found.sides if not side.why_not and side is not found.base]
    for place, side in enumerate([found.base, *others][:_MOST]):
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
        each.xaxis.set_major_formatter(lambda tokens, _: format_large(tokens))
        each.spines[["top", "right"]].set_visible(False)
    for label in training.legend(frameon=False, fontsize=8).get_texts():
        label.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have
        figure.savefig(buffer, dpi=120)
    return buffer.getvalue()
