"""A comparison as sections of sentences, tables and texts, which a terminal, Markdown and a page show alike.

Nothing is escaped here. Names, notes and samples may be a stranger's text: who shows a section escapes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpt2_fp8.measure.table import Row
from gpt2_fp8.reports import cells, verdict
from gpt2_fp8.reports.comparison import SHARES, Comparison, Reached
from gpt2_fp8.reports.spread import percent
from gpt2_fp8.reports.verdict import Verdict

_LONGEST_SAMPLE = 2_000  # characters


@dataclass(frozen=True)
class Section:
    """A part of a report. `texts` are shown beside each other, each under its title."""

    title: str
    sentences: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    brief: bool = True  # whether a terminal shows it, too


def of(found: Comparison, verdicts: Sequence[Verdict], notes: Sequence[str]) -> list[Section]:
    """Return the sections, the most wanted first; those without content are left out."""
    every = [
        _runs(found), _end(found), *_verdicts(found, verdicts), _to_the_loss(found, end=True), _speed(found),
        _at(found, by_time=False), _at(found, by_time=True), _to_the_loss(found, end=False), _gradients(found),
        *_samples(found), Section("To know", list(notes)),
    ]  # fmt: skip
    return [section for section in every if section.sentences or section.rows or section.texts]


def _runs(found: Comparison) -> Section:
    rows: list[Row] = []
    for result in found.results:
        runs = result.condition.runs
        rows.append(
            {
                "condition": result.condition.name + (" (base)" if result.condition is found.base else ""),
                "runs": str(len(runs)),
                "seeds": ", ".join(dict.fromkeys(result.condition.seeds)),
                "ran": result.condition.ran or "",
                "layers": runs[0].layers or "",
                "steps": cells.between([run.steps for run in runs]),
                "ended": ", ".join(dict.fromkeys(run.status for run in runs)),
            }
        )
    count = sum(len(result.condition.runs) for result in found.results)
    head = f"{count} runs of {len(rows)} conditions, up to the {found.tokens:,.0f} tokens that all have."
    return Section("Runs", [head], rows)


def _end(found: Comparison) -> Section:
    rows: list[Row] = []
    for result in found.results:
        row: Row = {"condition": result.condition.name}
        for title, gap in (("validation", result.validation), ("training", result.train)):
            if gap is not None:
                row |= {
                    title: cells.loss(gap),
                    f"{title} above base": cells.relative(gap) if result is not found.results[0] else "",
                }
        gap = result.validation or result.train
        if gap is not None and result is not found.results[0]:
            row |= {
                "difference": cells.difference(gap),
                "at most (95 %)": cells.bound(gap),
                "of equal seeds": cells.paired(gap),
            }
        if result.not_comparable:
            row["note"] = f"not compared: {result.not_comparable}"
        rows.append(row)
    at = "" if found.validated_at is None else f"Validation after {found.validated_at:,.0f} tokens. "
    told = (
        f"{at}Training losses are means of the last {found.width:,.0f} tokens "
        f"({percent(found.width / found.tokens, 0)} of all). Nats a token; in brackets the standard deviation between "
        "seeds, and of differences the standard error (Welch's). The difference is of the validation loss where there "
        "is one. The bound is one-sided."
    )
    return Section("Losses at the end", [told], rows)


def _verdicts(found: Comparison, verdicts: Sequence[Verdict]) -> Iterator[Section]:
    if why := verdict.why_none(found):
        yield Section("Verdict", [why])
    for judged in verdicts:
        rows: list[Row] = [
            {"item": line.item, "rule": line.rule, "answer": line.answer, "found": line.figure} for line in judged.lines
        ]
        yield Section(f"Verdict on {judged.condition}", [f"Against {found.base.name}."], rows)


def _to_the_loss(found: Comparison, end: bool) -> Section:
    """Return when conditions and the base had the same loss: that at the end, or those on the way there."""
    base, rows = found.base.name, []
    for result in found.results:
        each = [("validation", result.to_validation), *(("training", reached) for reached in result.to_train)]
        for loss, own in each:
            if own is not None and (own.share == 1) == end:
                rows.append(
                    {
                        "condition": result.condition.name,
                        **({} if end else {"level": f"at {cells.share(own.share)} of the tokens"}),
                        "loss": f"{loss} {own.loss:.4f}",
                        "tokens": f"{own.tokens:,.0f}",
                        f"{base}: tokens": f"{own.base_tokens:,.0f}",
                        "time": cells.time(own.seconds),
                        f"{base}: time": cells.time(own.base_seconds),
                        f"beside {base}": _beside(own),
                    }
                )
    if not end:
        told = "The same, for the higher of the two training losses after less tokens, where rates are higher."
        return Section("Time to the same loss on the way", [told], rows if rows else [], brief=False)
    told = (
        f"When the mean of a condition's runs, and of {base}'s, first came down to the higher of their two losses at "
        "the end. So both had it. A few per cent of the tokens may be less than seeds differ: see the losses above."
    )
    return Section("Time to the same loss", [told] if rows else [], rows)


def _beside(own: Reached) -> str:
    """Say how many tokens and how much time a condition needs beside the base: `3.1 % more tokens, ...`."""
    parts = [(own.tokens, own.base_tokens, "tokens", "as many", "fewer")]
    parts += [(own.seconds, own.base_seconds, "time", "as much", "less")]
    said = []
    for mine, other, what, equal, less in parts:
        ratio = mine / other if other else 1.0
        if ratio >= 2:
            said.append(f"{ratio:.1f} times the {what}")
        elif abs(ratio - 1) < 0.0005:
            said.append(f"{equal} {what}")
        else:
            said.append(f"{percent(abs(ratio - 1), 1)} {'more' if ratio > 1 else less} {what}")
    return ", ".join(said)


def _speed(found: Comparison) -> Section:
    base, rows = found.results[0].speed, []
    for result in found.results:
        speed = result.speed
        row: Row = {"condition": result.condition.name}
        if speed.tokens_per_second:
            row["tokens/s"] = f"{speed.tokens_per_second.mean:,.0f}"
            if base.tokens_per_second:
                row["x base"] = f"{speed.tokens_per_second.mean / base.tokens_per_second.mean:.2f}"
        if speed.lowest is not None and speed.highest is not None:
            row["5 % to 95 % of intervals"] = f"{speed.lowest:,.0f} to {speed.highest:,.0f}"
        row |= {
            "slow": cells.share(speed.slow), "waiting for data": cells.share(speed.waiting),
            "mfu_bf16": "" if speed.mfu_bf16 is None else f"{speed.mfu_bf16:.3f}",
            "GiB": "" if speed.memory_gb is None else f"{speed.memory_gb:.1f}",
            "of base": cells.share(speed.memory_gb / base.memory_gb) if speed.memory_gb and base.memory_gb else "",
            "time": cells.time(speed.seconds),
        }  # fmt: skip
        rows.append(row)
    told = (
        "Medians of a run's logged intervals, then means of the runs. Slow: intervals below 80 % of the run's median. "
        "GiB: the peak, allocated on a GPU, resident of the whole process on a CPU."
    )
    return Section("Speed and memory", [told], rows)


def _at(found: Comparison, by_time: bool) -> Section:
    rows: list[Row] = []
    end = found.seconds if by_time else found.tokens
    for result in found.results:
        row: Row = {"condition": result.condition.name}
        for share, gap in zip(SHARES, result.at_seconds if by_time else result.at_tokens, strict=False):
            title = cells.time(share * end) if by_time else f"{share * end:,.0f}"
            if gap is not None:
                row[title] = f"{gap.loss.mean:.4f}" if result is found.results[0] else cells.relative(gap)
        rows.append(row)
    before = f"the mean of the {found.width:,.0f} tokens before. Others are shown by how far they are above the base."
    if by_time:
        told = (
            f"Training loss after the same training time, up to the end of the quickest run: {before} "
            "A slower run is not at its end there, and its learning rate may not have come down."
        )
        return Section("Losses at equal time", [told], rows, brief=False)
    return Section("Losses at equal tokens", [f"Training loss after the same tokens: {before}"], rows, brief=False)


def _gradients(found: Comparison) -> Section:
    rows: list[Row] = []
    for result in found.results:
        own = result.gradients
        rows.append(
            {
                "condition": result.condition.name,
                "median, second half": "" if own.median is None else f"{own.median:.3f}",
                "largest after the first tenth": "" if own.largest is None else f"{own.largest:.3f}",
                "clipped": cells.share(own.clipped),
            }
        )
    return Section("Gradient norms", ["Before clipping, of the last step of each logged interval."], rows, brief=False)


def _samples(found: Comparison) -> Iterator[Section]:
    """Yield the samples at the last and a middle step that the first run of each condition has."""
    runs = {result.condition.name: result.condition.runs[0] for result in found.results}
    with_samples = {name: run for name, run in runs.items() if run.samples}
    if not with_samples:
        return
    steps = sorted(set.intersection(*(set(run.samples) for run in with_samples.values())))
    for step in dict.fromkeys([*steps[-1:], *steps[(len(steps) - 1) // 2 :][:1]]):
        texts = [
            (f"{name}, seed {run.settings.get('seed')}", run.samples[step][:_LONGEST_SAMPLE])
            for name, run in with_samples.items()
        ]
        yield Section(f"Samples at step {step:,}", texts=texts, brief=False)
