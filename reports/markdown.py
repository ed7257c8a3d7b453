"""Markdown for a comment on a pull request: failures first, and never past what a comment holds.

Whatever came from a scenario or a log is escaped: it cannot start a table cell, a tag, a link or a
mention.
"""

import re

from harness.records import Difference
from reports.summary import SYMBOLS, CaseReport, Report
from reports.text import clean, one_line

MAX_BYTES = 60_000
MAX_ROW_CHARS = 300
MAX_OUTPUT_CHARS = 4000
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$])")


def render(report: Report) -> str:
    """The comment, at most `MAX_BYTES` bytes of UTF-8."""
    head = [f"## {escape(report.scenario)}: {escape(report.headline)}", ""]
    if report.why:
        head += [escape(report.why), ""]
    if not report.counts["passed"] and not report.counts["failed"]:
        head += ["**No case passed: this run proves nothing about the candidates.**", ""]
    head += ["| | case | what | message |", "| --- | --- | --- | --- |"]
    foot = ["", f"Exit code {report.exit_code}. The page with curves is `report/index.html`.", "",
            f"Times: created {escape(report.created or 'at an unknown time')}; "
            f"{sum(case.verdict.wall_s for case in report.cases):.1f} s in all.", ""]  # fmt: skip
    rows = [_row(case) for case in report.cases]
    details = [_details(case) for case in report.cases if case.outcome not in ("passed", "skipped")]
    left = MAX_BYTES - _size(head) - _size(foot) - 200
    # The table may take half of the room, so that the first failures are told in full.
    kept_rows, used = _fit(rows, left // 2, "cases")
    kept_rows = [row if row.startswith("|") else f"\n{row}" for row in kept_rows]
    kept_details, _ = _fit(details, left - used, "failing cases in full")
    return "\n".join([*head, *kept_rows, "", *kept_details, *foot])


def escape(text: str) -> str:
    """Text that reads as itself in GitHub's Markdown, on one line."""
    plain = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = _SPECIAL.sub(r"\\\1", plain)
    return escaped.replace("@", "&#64;").replace("://", "&#58;//")


def fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _row(case: CaseReport) -> str:
    message = escape(one_line(case.message, MAX_ROW_CHARS))
    name, what = escape(case.spec.id), escape(case.verdict.what)
    return f"| {SYMBOLS[case.outcome]} {case.outcome} | {name} | {what} | {message} |"


def _details(case: CaseReport) -> str:
    lines = [
        "<details>",
        f"<summary>{SYMBOLS[case.outcome]} {case.outcome}: {_html(case.spec.id)}</summary>",
        "",
        escape(case.message),
        "",
    ]
    if case.verdict.difference is not None:
        lines += [fenced(_difference(case.verdict.difference)), ""]
    for result in case.verdict.checks:
        words = escape(one_line(result.message, MAX_ROW_CHARS))
        lines.append(f"- {SYMBOLS[result.outcome]} {escape(result.check)}: {words}")
    if case.curve is not None:
        lines += ["", escape(case.curve.words)]
    lines += ["", "Repeat:", "", fenced(one_line(case.command)), ""]
    if case.output is not None:
        lines += [f"Last output of rank {case.output.rank}, {case.output.leg}:", ""]
        lines += [fenced(clean(case.output.text[-MAX_OUTPUT_CHARS:])), ""]
    return "\n".join([*lines, "</details>", ""])


def _difference(place: Difference) -> str:
    of = f" of {place.tensor}" if place.tensor else ""
    lines = [f"step {place.step}, rank {place.rank}, {place.quantity}{of}"]
    lines += [f"reference {place.reference}", f"candidate {place.candidate}"]
    if place.ulps is not None:
        lines.append(f"distance  {place.ulps} ulp")
    return "\n".join(one_line(line, MAX_ROW_CHARS) for line in lines)


def _html(text: str) -> str:
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _size(lines: list[str]) -> int:
    return sum(len(line.encode("utf-8", "replace")) + 1 for line in lines)


def _fit(blocks: list[str], room: int, noun: str) -> tuple[list[str], int]:
    """As many leading blocks as fit, and a line that counts the rest; with the bytes used."""
    kept, used = [], 0
    for place, block in enumerate(blocks):
        used += _size([block])
        if used > room:
            used -= _size([block])
            kept.append(f"*{len(blocks) - place} more {noun} are in the page.*")
            break
        kept.append(block)
    return kept, used
