"""A report in a few lines, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from captum_ssm.explanation.corpus.parts import LISTED, ReportData
from captum_ssm.explanation.read import printable

BAR = 24


def told(report: ReportData) -> str:
    """The lines of ``print(report)``."""
    # A line that begins a part has an empty one before it; no other break is the report's own.
    parts = (("\n" * line.startswith("\n"), line.removeprefix("\n")) for line in _lines(report))
    return "\n".join(gap + printable(line) for gap, line in parts)


def _lines(report: ReportData) -> Iterator[str]:
    right = "" if report.right is None else f", {report.right:.1%} predicted right"
    what = f"{len(report.examples)} examples of {report.model} by {report.method}"
    yield f"{report.title}: {what}{right}"
    for kind in (report.units, "part"):
        entries = report.shares.get(kind, ())[:LISTED]
        if not entries:
            continue
        yield f"\n{kind:22s} {'examples':>8s} {'mean share':>10s}  95% interval"
        top = max(one.share for one in entries)
        for one in entries:
            bar = "#" * round(BAR * one.share / (top or 1.0))
            numbers = f"{one.examples:8d} {one.share:10.1%}  {one.low:6.1%} to {one.high:6.1%}"
            yield f"{str(one.key)[:22]:22s} {numbers}  {bar}"
    tenths = {one.key: one.share for one in report.shares["tenth"]}
    yield "\nshare of each tenth of the text, from its start to its end:"
    yield " ".join(f"{tenths.get(k, 0.0):5.1%}" for k in range(10))
    yield from _slices(report)
    if report.change is not None:
        change = report.change
        yield (
            f"\nagainst {change.other}: {change.moved.value:.1%} of the relevance lies elsewhere "
            f"({change.moved.low:.1%} to {change.moved.high:.1%}), "
            f"{len(change.flipped)} predictions differ"
        )
        for gap in change.shares.get(report.units, ())[:LISTED]:
            yield f"{str(gap.key)[:22]:22s} {gap.elsewhere:6.1%} -> {gap.here:6.1%}"
    if report.errors:
        first = ", ".join(map(str, list(report.errors)[:LISTED]))
        yield f"\n{len(report.errors)} rows have errors and are left out: {first}"
    yield from report.notes


def _slices(report: ReportData) -> Iterator[str]:
    by = None
    for part in report.slices:
        if part.by != by:
            by = part.by
            yield f"\nby {by}"
        right = "" if part.right is None else f" {part.right:7.1%} right"
        more = [str(one.key) for one in part.apart if one.low > 0 and one.kind == report.units]
        words = f"  more on {', '.join(more[:4])}" if more else ""
        yield f"{part.name[:30]:30s} {len(part.examples):6d}{right}{words}"
